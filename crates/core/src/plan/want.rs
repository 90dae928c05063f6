//! Placement: which part of each tensor this process wants, as contiguous byte ranges ("runs").

use crate::error::{Error, ErrorKind, Result};
use crate::format::{quoted, Checkpoint, TensorInfo};
use std::ops::Range;

/// The wanted elements of one dimension: `start`, `start + step` and so on, before `end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AxisSlice {
    /// The first element.
    pub start: u64,
    /// One past the last element that may be wanted.
    pub end: u64,
    /// From one element to the next; at least 1.
    pub step: u64,
}

impl AxisSlice {
    /// How many elements.
    pub fn count(&self) -> u64 {
        self.end.saturating_sub(self.start).div_ceil(self.step.max(1))
    }
}

impl From<Range<u64>> for AxisSlice {
    fn from(range: Range<u64>) -> Self {
        Self { start: range.start, end: range.end, step: 1 }
    }
}

/// One wanted tensor or part of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Want {
    /// Number of the tensor in the checkpoint.
    pub tensor: u32,
    /// The hyper-rectangle wanted, one slice per dimension; `None` wants the whole tensor.
    pub region: Option<Box<[AxisSlice]>>,
}

impl Want {
    /// The whole of tensor number `tensor`.
    pub fn whole(tensor: u32) -> Self {
        Self { tensor, region: None }
    }

    /// A part of tensor number `tensor`: one range (or slice) per dimension.
    pub fn part<S: Into<AxisSlice>>(tensor: u32, region: impl IntoIterator<Item = S>) -> Self {
        Self { tensor, region: Some(region.into_iter().map(Into::into).collect()) }
    }

    /// Every tensor of a checkpoint, whole, in file order.
    pub fn all(checkpoint: &Checkpoint) -> Vec<Self> {
        (0..checkpoint.len() as u32).map(Self::whole).collect()
    }

    /// Shape of the wanted part, in elements.
    pub fn shape(&self, info: &TensorInfo<'_>) -> Vec<u64> {
        match &self.region {
            None => info.shape.to_vec(),
            Some(r) => r.iter().map(AxisSlice::count).collect(),
        }
    }
}

/// The runs of one want: `count` runs of `len` bytes each, nested in strided axes (at most as many as dimensions), in
/// ascending order of both file offset and dense (row-major) destination offset. They are never listed: a column slice
/// has millions of runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runs {
    /// Offset of the first run, from the start of the file.
    pub start: u64,
    /// Bytes in each run; 0 only where nothing is wanted (then `axes` is empty).
    pub len: u64,
    /// (count, stride in bytes of the file), outermost first; every count is at least 2.
    pub axes: Vec<(u64, u64)>,
}

impl Runs {
    /// The runs of `want`, as few and as long as possible. With steps, two runs may touch.
    ///
    /// # Errors
    /// `Slice` if the region has the wrong rank, leaves the tensor, or does not begin and end at whole bytes (sub-byte
    /// dtypes); `UnknownTensor` if the checkpoint has no tensor of that number.
    pub fn of(checkpoint: &Checkpoint, want: &Want) -> Result<Runs> {
        if want.tensor as usize >= checkpoint.len() {
            return Err(Error::new(
                ErrorKind::UnknownTensor,
                format!("no tensor number {}: the checkpoint has {}", want.tensor, checkpoint.len()),
            ));
        }
        let info = checkpoint.tensor(want.tensor);
        let Some(region) = &want.region else {
            return Ok(Runs { start: info.begin, len: info.nbytes(), axes: Vec::new() });
        };
        let wrong = |why: String| {
            let path = &checkpoint.files()[info.file as usize].spelled;
            let (of, dtype, shape) = (quoted(info.name), info.dtype, info.shape);
            let text = format!("slice {} of tensor {of} ({dtype} x {shape:?}): {why}", spelled(region));
            Error::new(ErrorKind::Slice, text).at(path).range(info.begin..info.end).of_tensor(info.name)
        };
        if region.len() != info.shape.len() {
            let (found, expected) = (region.len() as u64, info.shape.len() as u64);
            return Err(wrong(format!("it has {found} dimensions, the tensor {expected}")).with_values(expected, found));
        }
        for (axis, (r, &extent)) in region.iter().zip(info.shape).enumerate() {
            if r.start > r.end || r.end > extent {
                let (expected, found) = (format!("0..{extent}"), format!("{}..{}", r.start, r.end));
                let text = format!("{found} is not within {expected} in dimension {axis}");
                return Err(wrong(text).with_values(expected, found));
            }
            if r.step == 0 {
                return Err(wrong(format!("its step is 0 in dimension {axis}")));
            }
        }
        if region.iter().any(|r| r.start == r.end) {
            return Ok(Runs { start: info.begin, len: 0, axes: Vec::new() });
        }
        // No product below overflows: opening the checkpoint has computed the product of this shape. Nothing here is
        // empty, so every factor is at least 1.
        let bits = info.dtype.bits();
        let (mut start, mut len, mut stride) = (0, bits, bits);
        let mut whole = true;
        let mut axes: Vec<(u64, u64)> = Vec::new();
        for (r, &extent) in region.iter().zip(info.shape).rev() {
            let count = r.count();
            start += r.start * stride;
            if whole && (r.step == 1 || count == 1) {
                // All inner dimensions are wanted in full, so this range is contiguous.
                len *= count;
                whole = count == extent;
            } else if count > 1 {
                whole = false;
                // There are at least two, so the step stays within the tensor.
                let step = r.step * stride;
                match axes.last_mut() {
                    // The next outer axis continues where this one ends: they are one longer axis.
                    Some(inner) if inner.0 * inner.1 == step => inner.0 *= count,
                    _ => axes.push((count, step)),
                }
            }
            stride *= extent;
        }
        if start % 8 != 0 || len % 8 != 0 || axes.iter().any(|a| a.1 % 8 != 0) {
            return Err(wrong(format!(
                "its elements have {bits} bits each, and it does not begin and end at whole bytes"
            )));
        }
        axes.reverse();
        axes.iter_mut().for_each(|a| a.1 /= 8);
        Ok(Runs { start: info.begin + start / 8, len: len / 8, axes })
    }

    /// How many runs there are.
    pub fn count(&self) -> u64 {
        self.axes.iter().map(|a| a.0).product()
    }

    /// Bytes of all runs together.
    pub fn nbytes(&self) -> u64 {
        self.count() * self.len
    }

    /// File offset of run number `i` (0-based, ascending); its dense offset is `i * len`.
    pub fn offset(&self, mut i: u64) -> u64 {
        let mut at = self.start;
        for &(count, stride) in self.axes.iter().rev() {
            at += i % count * stride;
            i /= count;
        }
        at
    }

    /// How many bytes of the runs lie before byte `at` of the file: the dense offset of the first one from there on.
    pub fn before(&self, at: u64) -> u64 {
        let Some(mut left) = at.checked_sub(self.start) else { return 0 };
        let (mut within, mut bytes) = (self.count(), 0);
        for &(count, stride) in &self.axes {
            within /= count;
            let steps = left / stride;
            if steps >= count {
                return bytes + count * within * self.len;
            }
            bytes += steps * within * self.len;
            left -= steps * stride;
        }
        bytes + left.min(self.len)
    }

    /// The runs, and parts of runs, that have these dense bytes: file offset and dense bytes of each, ascending.
    pub fn rows(&self, dense: Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> + '_ {
        let mut at = dense.start;
        std::iter::from_fn(move || {
            let row = self.row(at..dense.end)?;
            at = row.1.end;
            Some(row)
        })
    }

    /// The same: file offset and length of each.
    pub(crate) fn into_rows(self, dense: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        let mut at = dense.start;
        std::iter::from_fn(move || {
            let (offset, part) = self.row(at..dense.end)?;
            at = part.end;
            Some((offset, part.end - part.start))
        })
    }

    /// The first row of them.
    fn row(&self, dense: Range<u64>) -> Option<(u64, Range<u64>)> {
        if dense.is_empty() {
            return None;
        }
        let (number, within) = (dense.start / self.len, dense.start % self.len);
        let end = dense.end.min(dense.start + self.len - within);
        Some((self.offset(number) + within, dense.start..end))
    }

    /// One past the last byte of the last run, from the start of the file.
    pub fn end(&self) -> u64 {
        self.axes.iter().map(|&(n, s)| (n - 1) * s).sum::<u64>() + self.start + self.len
    }

    /// How these runs are read. Bytes between two runs are read too if they are at most `gap`.
    ///
    /// Strips go along the innermost axis. The exception is a want with very many strips (every second element of each
    /// kernel of a convolution: two runs per strip). Then they go along the longest of the axes whose runs are near
    /// enough.
    pub fn strips(&self, gap: u64) -> Strips {
        let all = self.count();
        let mut found = Strips { count: all, runs: 1, stride: self.len, inner: 1 };
        let mut inner = 1;
        for &(runs, stride) in self.axes.iter().rev() {
            if stride - self.len > gap || (inner > 1 && found.count <= MANY) {
                break;
            }
            if runs > found.runs {
                found = Strips { count: all / runs, runs, stride, inner };
            }
            inner *= runs;
        }
        found
    }
}

/// More strips than this are reduced if possible, although a copied strip is then not dense at the destination.
const MANY: u64 = 16 << 10;

/// Runs of one want that are read together: `count` times as many `runs`, `stride` bytes apart in the file, along one
/// axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strips {
    /// How many strips.
    pub count: u64,
    /// Runs in each.
    pub runs: u64,
    /// Bytes of the file from one run of a strip to the next; the length of a run if the strip has only one.
    pub stride: u64,
    /// Difference between the numbers of neighbouring runs of a strip: if it is more than 1, runs of other strips lie
    /// between them.
    pub inner: u64,
}

impl Strips {
    /// Number of the first run of strip number `i`. Strips ascend by the offsets of their first runs.
    pub fn first(&self, i: u64) -> u64 {
        i / self.inner * self.runs * self.inner + i % self.inner
    }
}

/// A region as Python would write it.
fn spelled(region: &[AxisSlice]) -> String {
    let spelled = |a: &AxisSlice| match a.step {
        1 => format!("{}:{}", a.start, a.end),
        step => format!("{}:{}:{step}", a.start, a.end),
    };
    format!("[{}]", region.iter().map(spelled).collect::<Vec<_>>().join(", "))
}

/// Numbers of the tensors that `patterns` name, ascending, each once. A pattern is a tensor's exact name, or else a
/// glob as in Python's `fnmatch.fnmatchcase`: `*` any text (dots too), `?` one character, `[a-z]` one of these,
/// `[!a-z]` one that is not among these.
///
/// # Errors
/// `UnknownTensor`, which lists every pattern without a tensor and the names that come close.
pub fn names_matching<S: AsRef<str>>(checkpoint: &Checkpoint, patterns: &[S]) -> Result<Vec<u32>> {
    const SHOWN: usize = 8;
    let mut numbers = Vec::new();
    let mut unknown: Vec<&str> = Vec::new();
    for pattern in patterns.iter().map(AsRef::as_ref) {
        // Exact names first: brackets are legal in names.
        if let Some(tensor) = checkpoint.find(pattern) {
            numbers.push(tensor.index);
            continue;
        }
        let before = numbers.len();
        if pattern.contains(['*', '?', '[']) {
            let glob = Glob::new(pattern);
            numbers.extend(checkpoint.tensors().filter(|t| glob.matches(t.name)).map(|t| t.index));
        }
        if numbers.len() == before {
            unknown.push(pattern);
        }
    }
    if unknown.is_empty() {
        numbers.sort_unstable();
        numbers.dedup();
        return Ok(numbers);
    }
    let mut text = match unknown[..] {
        [_] => "the checkpoint has no tensor ".to_owned(),
        _ => format!("{} names are not in the checkpoint: ", unknown.len()),
    };
    for (i, name) in unknown.iter().take(SHOWN).enumerate() {
        let close = close_to(checkpoint, name);
        text.push_str(if i > 0 { "; " } else { "" });
        text.push_str(&quoted(name));
        if !close.is_empty() {
            text.push_str(&format!(" (close: {})", close.join(", ")));
        }
    }
    if unknown.len() > SHOWN {
        text.push_str(&format!("; and {} more", unknown.len() - SHOWN));
    }
    let mut error = Error::new(ErrorKind::UnknownTensor, text);
    if let Some(name) = unknown.iter().find(|name| !name.contains(['*', '?', '['])) {
        error = error.of_tensor(*name);
    }
    if let Some(file) = checkpoint.files().first() {
        error = error.at(&file.spelled);
    }
    Err(error)
}

/// Up to three names that share most of their beginning and end with `name`. This takes one pass over all names; an
/// edit distance would take seconds for 371,474 names.
fn close_to(checkpoint: &Checkpoint, name: &str) -> Vec<String> {
    let mut best: Vec<(usize, u32)> = Vec::new();
    for t in checkpoint.tensors() {
        let same =
            |pairs: &mut dyn Iterator<Item = (u8, u8)>| pairs.take_while(|(a, b)| a.eq_ignore_ascii_case(b)).count();
        let shorter = t.name.len().min(name.len());
        let front = same(&mut t.name.bytes().zip(name.bytes()));
        let back = same(&mut t.name.bytes().rev().zip(name.bytes().rev())).min(shorter - front);
        // In thousandths of the longer name.
        let score = (front + back) * 1000 / t.name.len().max(name.len()).max(1);
        if score >= 500 && (best.len() < 3 || best.last().is_some_and(|b| score > b.0)) {
            best.truncate(2);
            let at = best.partition_point(|b| b.0 >= score);
            best.insert(at, (score, t.index));
        }
    }
    best.into_iter().map(|b| quoted(checkpoint.tensor(b.1).name)).collect()
}

/// A compiled glob.
struct Glob(Vec<Token>);

enum Token {
    /// `*`
    Many,
    /// `?`
    One,
    Char(char),
    /// `[...]`: inclusive ranges, and whether the set is negated.
    Set(Vec<(char, char)>, bool),
}

impl Glob {
    fn new(pattern: &str) -> Glob {
        let mut tokens = Vec::new();
        let mut rest = pattern;
        while let Some(c) = rest.chars().next() {
            rest = &rest[c.len_utf8()..];
            tokens.push(match c {
                // Two stars match what one matches, and would cost a backtrack.
                '*' if matches!(tokens.last(), Some(Token::Many)) => continue,
                '*' => Token::Many,
                '?' => Token::One,
                '[' => match set(rest) {
                    Some((token, after)) => {
                        rest = after;
                        token
                    }
                    // Never closed: it is a bracket like any other character.
                    None => Token::Char('['),
                },
                other => Token::Char(other),
            });
        }
        Glob(tokens)
    }

    fn matches(&self, name: &str) -> bool {
        let (mut rest, mut at) = (name.chars(), 0);
        // Where to continue after the last star if the rest does not match: one character further.
        let mut retry: Option<(std::str::Chars<'_>, usize)> = None;
        loop {
            let mut ahead = rest.clone();
            let fits = match (self.0.get(at), ahead.next()) {
                (None, None) => return true,
                (Some(Token::Many), _) => {
                    at += 1;
                    retry = Some((rest.clone(), at));
                    continue;
                }
                (Some(Token::One), Some(_)) => true,
                (Some(Token::Char(want)), Some(c)) => *want == c,
                (Some(Token::Set(ranges, avoid)), Some(c)) => ranges.iter().any(|r| r.0 <= c && c <= r.1) != *avoid,
                (_, _) => false,
            };
            if fits {
                rest = ahead;
                at += 1;
                continue;
            }
            let Some((from, star)) = &mut retry else { return false };
            if from.next().is_none() {
                return false;
            }
            (rest, at) = (from.clone(), *star);
        }
    }
}

/// The set that begins after a `[`, and the text after its `]`. A `]` right at the beginning is an ordinary character.
fn set(text: &str) -> Option<(Token, &str)> {
    let (avoid, body) = match text.strip_prefix('!') {
        Some(body) => (true, body),
        None => (false, text),
    };
    let close = body.char_indices().skip(1).find(|c| c.1 == ']')?.0;
    let chars: Vec<char> = body[..close].chars().collect();
    let mut ranges = Vec::new();
    let mut i = 0;
    while i < chars.len() {
        if i + 2 < chars.len() && chars[i + 1] == '-' {
            ranges.push((chars[i], chars[i + 2]));
            i += 3;
        } else {
            ranges.push((chars[i], chars[i]));
            i += 1;
        }
    }
    Some((Token::Set(ranges, avoid), &body[close + 1..]))
}
