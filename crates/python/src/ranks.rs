//! `_core.Pass`, `_core.Seat`, `_core.Mesh`, `_core.Standing`, `_core.Shares`: several ranks that load one checkpoint together.

use crate::checkpoint::Checkpoint;
use crate::errors::{detached, interruptibly, invalid, raise};
use crate::guard::{answer, guarded, Answer, Held, Listed};
use crate::options::Options;
use crate::wants::{wants_of, Region};
use penstock::load::TRIED;
use penstock::options::{Bind, Scope};
use penstock::peers::{ListenAt, PeerKey, Reachable, StandingLinks};
use penstock::peers::{Lookout as CoreLookout, Mesh as CoreMesh, Pass as CorePass, Seat as CoreSeat};
use penstock::plan::packed;
use penstock::plan::shares::{RankWants, Shares as CoreShares};
use penstock::plan::traffic::{OfNode, OfRank, PlannedTraffic, StorageReads};
use penstock::Want;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyString};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The pass of a rank for the others: its number, a token, and a proof of the key in its environment, if it has one.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Pass(Held<CorePass>);

#[pymethods]
impl Pass {
    /// Reads the key from the environment. `token`: 16 random bytes.
    #[new]
    fn new(py: Python<'_>, rank: u32, token: [u8; 16]) -> PyResult<Self> {
        guarded(py, || {
            let key = detached(py, PeerKey::of_environment)?;
            Ok(Self(Held::new(CorePass { rank, token, key })))
        })
    }

    /// A text by which other ranks see whether they have the same key. It says nothing else. "" without a key.
    fn mark<'py>(&self, py: Python<'py>) -> Answer<'py, String> {
        answer(py, || {
            let CorePass { rank, token, key } = &*self.0;
            let bytes = key.as_ref().map(|key| key.mark(*rank, token));
            Ok(bytes.iter().flatten().map(|byte| format!("{byte:02x}")).collect::<String>())
        })
    }

    /// Whether a rank with this token and mark has the key that this one has, or has none as this one.
    fn matches<'py>(&self, py: Python<'py>, rank: u32, token: [u8; 16], mark: &str) -> Answer<'py, bool> {
        answer(py, || {
            let Some(key) = &self.0.key else { return Ok(mark.is_empty()) };
            let byte = |at: usize| mark.get(at..at + 2).and_then(|two| u8::from_str_radix(two, 16).ok());
            let bytes: Option<Vec<u8>> = (0..mark.len()).step_by(2).map(byte).collect();
            Ok(bytes.is_some_and(|mark| key.is_mark(&mark, rank, &token)))
        })
    }
}

/// A rank's own address, before it knows those of the others.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Seat(Held<Owned<CoreSeat>>);

/// The connections of a rank to all others. A load takes them.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Mesh(Held<Owned<CoreMesh>>);

/// The reader of each byte of a checkpoint that several ranks load together.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Shares(pub(crate) Held<Arc<CoreShares>>);

fn address_of(host: &str) -> PyResult<IpAddr> {
    host.parse().map_err(|_| invalid(format!("{host:?} is no address of the internet protocol, such as \"10.0.0.7\"")))
}

fn address((host, port): &(String, u16)) -> PyResult<SocketAddr> {
    Ok(SocketAddr::new(address_of(host)?, *port))
}

/// A rank that can be asked whether it is there: its host, its port, its token.
type Reached = (String, u16, [u8; 16]);

fn asked((host, port, token): &Reached) -> PyResult<Reachable> {
    Ok((SocketAddr::new(address_of(host)?, *port), *token))
}

/// A value until it is taken or closed, and the error after that.
struct Owned<T>(Mutex<Option<T>>, &'static str);

impl<T: Send> Owned<T> {
    fn new(value: T, gone: &'static str) -> Held<Self> {
        Held::new(Self(Mutex::new(Some(value)), gone))
    }

    fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the value that runs no Python code. Errors are made without the lock: that does.
    fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> PyResult<R> {
        let done = self.lock().as_mut().map(work);
        done.ok_or_else(|| invalid(self.1))
    }

    fn take(&self) -> PyResult<T> {
        let taken = self.lock().take();
        taken.ok_or_else(|| invalid(self.1))
    }

    /// Takes the value, if it is there, and ends it. Releases the GIL, because that joins threads.
    fn close(&self, py: Python<'_>, end: impl FnOnce(T) + Send) -> PyResult<()> {
        let owned = self.lock().take();
        py.detach(|| owned.map_or((), end));
        Ok(())
    }
}

fn place(host: &str, options: &Options) -> PyResult<ListenAt> {
    Ok(ListenAt { at: address_of(host)?, ports: options.0.ports })
}

/// The address that `bind=` means: one, or an interface. `None`: it is empty.
#[pyfunction]
pub(crate) fn bound<'py>(py: Python<'py>, bind: &str) -> Answer<'py, Option<String>> {
    answer(py, || {
        let bind = Bind::parse(bind).map_err(|why| invalid(format!("{bind:?}: {why}")))?;
        let found = detached(py, || penstock::peers::bound(&bind))?;
        Ok(found.map(|address| address.to_string()))
    })
}

#[pymethods]
impl Seat {
    /// Listens at this address, at two of the ports that the options name.
    #[new]
    fn new(py: Python<'_>, host: &str, options: &Options, known: &Pass) -> PyResult<Self> {
        guarded(py, || {
            let seat = CoreSeat::new(place(host, options)?, known.0.clone()).map_err(|e| raise(py, &e))?;
            Ok(Self(Owned::new(seat, "this seat was taken")))
        })
    }

    /// The port.
    #[getter]
    fn port<'py>(&self, py: Python<'py>) -> Answer<'py, u16> {
        answer(py, || self.0.with(|seat| seat.address())?.map(|address| address.port()).map_err(|e| raise(py, &e)))
    }

    /// The port at which others ask whether this rank is there.
    #[getter]
    fn pulse<'py>(&self, py: Python<'py>) -> Answer<'py, u16> {
        answer(py, || self.0.with(|seat| seat.pulse().port()))
    }

    /// Watches the other ranks from now on: (host, port, token) of what answers there. `silence`: seconds without an answer.
    fn watch<'py>(&self, py: Python<'py>, pulses: Listed<Reached>, silence: f64) -> Answer<'py, ()> {
        answer(py, || {
            let pulses = pulses.0.iter().map(asked).collect::<PyResult<Vec<_>>>()?;
            let silence = Duration::try_from_secs_f64(silence).unwrap_or_default();
            self.0.with(|seat| seat.watch(&pulses, silence))
        })
    }

    /// Raises PeerError if one of these ranks is not there any more.
    fn look(&self, py: Python<'_>, ranks: Listed<u32>) -> PyResult<()> {
        guarded(py, || detached(py, || self.0.lock().as_mut().map_or(Ok(()), |seat| seat.look(&ranks.0))))
    }

    /// Listens no more.
    fn close<'py>(&self, py: Python<'py>) -> Answer<'py, ()> {
        answer(py, || self.0.close(py, drop))
    }

    /// Connects to all others: (host, port) of all ranks (None: it is no member), and 16 bytes that name this load. `go_on` is
    /// asked every 50 ms whether to go on waiting; what it raises is raised.
    #[pyo3(signature = (addresses, token, timeout, go_on = None))]
    fn join(
        &self,
        py: Python<'_>,
        addresses: Listed<Option<(String, u16)>>,
        token: [u8; 16],
        timeout: f64,
        go_on: Option<Py<PyAny>>,
    ) -> PyResult<Mesh> {
        guarded(py, || {
            let seat = self.0.take()?;
            let addresses = addresses.0.iter().map(|one| one.as_ref().map(address).transpose());
            let addresses = addresses.collect::<PyResult<Vec<_>>>()?;
            if seat.rank() as usize >= addresses.len() {
                return Err(invalid(format!("rank {} of {}", seat.rank(), addresses.len())));
            }
            let patience = Duration::try_from_secs_f64(timeout).unwrap_or_default();
            let mesh = asking(py, go_on, |go_on| seat.join(&addresses, token, patience, go_on))?;
            Ok(Mesh(Owned::new(mesh, "these connections were taken by another load")))
        })
    }
}

/// Does something that asks now and then whether to go on. Raises what the answer raises.
fn asking<T: Send>(
    py: Python<'_>,
    ask: Option<Py<PyAny>>,
    work: impl FnOnce(&mut (dyn FnMut() -> bool + Send)) -> penstock::Result<T> + Send,
) -> PyResult<T> {
    let mut raised = None;
    let mut asked = || {
        let Some(ask) = &ask else { return true };
        match Python::try_attach(|py| ask.call0(py)?.extract::<bool>(py)) {
            Some(Ok(answer)) => answer,
            Some(Err(error)) => {
                raised = Some(error);
                false
            }
            None => false,
        }
    };
    let done = interruptibly(py, |go_on| work(&mut || go_on() && asked()));
    raised.map_or(done, Err)
}

impl Mesh {
    pub(crate) fn take(&self) -> PyResult<CoreMesh> {
        self.0.take()
    }
}

#[pymethods]
impl Mesh {
    /// Closes the connections, if no load has taken them.
    fn close<'py>(&self, py: Python<'py>) -> Answer<'py, ()> {
        answer(py, || self.0.close(py, drop))
    }
}

/// A rank that answers, and watches the others, while no load of them is under way.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Lookout(Held<Owned<CoreLookout>>);

#[pymethods]
impl Lookout {
    /// Answers at this address, at one of the ports that the options name.
    #[new]
    fn new(py: Python<'_>, host: &str, options: &Options, known: &Pass) -> PyResult<Self> {
        guarded(py, || {
            let lookout = CoreLookout::new(place(host, options)?, known.0.clone()).map_err(|e| raise(py, &e))?;
            Ok(Self(Owned::new(lookout, "this lookout was closed")))
        })
    }

    /// The port at which it answers.
    #[getter]
    fn pulse<'py>(&self, py: Python<'py>) -> Answer<'py, u16> {
        answer(py, || self.0.with(|lookout| lookout.address().port()))
    }

    /// Watches the other ranks from now on: (host, port, token) of what answers there. `silence`: seconds without an answer.
    fn watch<'py>(&self, py: Python<'py>, pulses: Listed<Reached>, silence: f64) -> Answer<'py, ()> {
        answer(py, || {
            let pulses = pulses.0.iter().map(asked).collect::<PyResult<Vec<_>>>()?;
            let silence = Duration::try_from_secs_f64(silence).unwrap_or_default();
            self.0.with(|lookout| lookout.watch(&pulses, silence))?.map_err(|e| raise(py, &e))
        })
    }

    /// Raises PeerError if a rank was stopped.
    fn look<'py>(&self, py: Python<'py>) -> Answer<'py, ()> {
        answer(py, || {
            let lost = self.0.lock().as_ref().and_then(CoreLookout::lost);
            lost.map_or(Ok(()), |e| Err(raise(py, &e)))
        })
    }

    /// Answers no more, and watches nobody.
    fn close<'py>(&self, py: Python<'py>) -> Answer<'py, ()> {
        answer(py, || self.0.close(py, drop))
    }
}

/// Connections that stand between loads: a process that ends closes its own.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct Standing(Held<Owned<StandingLinks>>);

#[pymethods]
impl Standing {
    /// Listens at this address, at one of the ports that the options name.
    #[new]
    fn new(py: Python<'_>, host: &str, options: &Options, known: &Pass) -> PyResult<Self> {
        guarded(py, || {
            let standing = StandingLinks::new(place(host, options)?, known.0.clone()).map_err(|e| raise(py, &e))?;
            Ok(Self(Owned::new(standing, "these connections were closed")))
        })
    }

    /// The port.
    #[getter]
    fn port<'py>(&self, py: Python<'py>) -> Answer<'py, u16> {
        answer(py, || self.0.with(|standing| standing.address().port()))
    }

    /// Connects to all others: (host, port) of all ranks, (host, port, token) of what says whether they are there, and 16 bytes
    /// that name those that belong together. `silence`: seconds without an answer. `go_on` is asked every 50 ms whether to go on
    /// waiting; what it raises is raised.
    #[pyo3(signature = (addresses, pulses, token, timeout, silence, go_on = None))]
    #[allow(clippy::too_many_arguments)] // Python's
    fn join(
        &self,
        py: Python<'_>,
        addresses: Listed<(String, u16)>,
        pulses: Listed<Reached>,
        token: [u8; 16],
        timeout: f64,
        silence: f64,
        go_on: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        guarded(py, || {
            let addresses = addresses.0.iter().map(address).collect::<PyResult<Vec<_>>>()?;
            let pulses = pulses.0.iter().map(asked).collect::<PyResult<Vec<_>>>()?;
            let [patience, silence] = [timeout, silence].map(|s| Duration::try_from_secs_f64(s).unwrap_or_default());
            // Others may ask meanwhile who has closed: nobody yet
            let mut standing = self.0.take()?;
            if standing.rank() as usize >= addresses.len() {
                return Err(invalid(format!("rank {} of {}", standing.rank(), addresses.len())));
            }
            asking(py, go_on, |go_on| standing.join(&addresses, &pulses, token, (patience, silence), go_on))?;
            *self.0.lock() = Some(standing);
            Ok(())
        })
    }

    /// Ranks that have closed their connection, and for which rank each of them has given up (None: it has not said so).
    fn closed<'py>(&self, py: Python<'py>) -> Answer<'py, Vec<(u32, Option<u32>)>> {
        answer(py, || Ok(self.0.lock().as_mut().map_or_else(Vec::new, |standing| standing.closed().to_vec())))
    }

    /// Closes them. `blamed`: the rank for which this one gives up.
    #[pyo3(signature = (blamed = None))]
    fn close<'py>(&self, py: Python<'py>, blamed: Option<u32>) -> Answer<'py, ()> {
        answer(py, || self.0.close(py, |mut standing| standing.close(blamed)))
    }
}

#[pymethods]
impl Shares {
    /// `lists`: what ranks want, as `pack_wants` gives it; `of_rank`: the number of each rank's list; `trial`: whether the ranks
    /// find out if they exchange it.
    #[new]
    #[pyo3(signature = (checkpoint, lists, of_rank, trial = false))]
    fn new(
        py: Python<'_>,
        checkpoint: &Checkpoint,
        lists: Listed<PyBackedBytes>,
        of_rank: Listed<u32>,
        trial: bool,
    ) -> PyResult<Self> {
        guarded(py, || {
            let core = checkpoint.0.clone();
            let shares = detached(py, || {
                let lists: Vec<&[u8]> = lists.0.iter().map(|list| &list[..]).collect();
                let wants = RankWants { lists: &lists, of_rank: &of_rank.0 };
                if trial {
                    CoreShares::with_trial(&core, wants, TRIED)
                } else {
                    CoreShares::new(&core, wants)
                }
            })?;
            Ok(Self(Held::new(Arc::new(shares))))
        })
    }

    /// For each rank: bytes that it reads for itself and others.
    fn shared_bytes<'py>(&self, py: Python<'py>) -> Answer<'py, Vec<u64>> {
        answer(py, || {
            let mut read = vec![0; self.0.ranks()];
            self.0.parcels().iter().for_each(|parcel| read[parcel.reader as usize] += parcel.end - parcel.start);
            Ok(read)
        })
    }
}

/// Whether this machine's page cache holds everything that a rank wants. Asks the file systems.
#[pyfunction]
#[pyo3(signature = (checkpoint, wants = None, regions = None))]
pub(crate) fn is_resident<'py>(
    py: Python<'py>,
    checkpoint: &Checkpoint,
    wants: Option<Listed<u32>>,
    regions: Option<Listed<Region>>,
) -> Answer<'py, bool> {
    answer(py, || {
        let (core, wants) = (checkpoint.0.clone(), wants_of(&checkpoint.0, wants, regions)?);
        detached(py, || penstock::plan::is_resident(&core, &wants))
    })
}

/// How many bytes of the files the page cache does not hold, from the first to the last wanted one, and how many there are;
/// or why a file cannot be mapped under a lease. Asks the file systems.
#[pyfunction]
#[pyo3(signature = (checkpoint, wants = None))]
pub(crate) fn missing_where_mappable<'py>(
    py: Python<'py>,
    checkpoint: &Checkpoint,
    wants: Option<Listed<u32>>,
) -> Answer<'py, Bound<'py, PyAny>> {
    answer(py, || {
        let (core, wants) = (checkpoint.0.clone(), wants_of(&checkpoint.0, wants, None)?);
        match detached(py, || penstock::plan::missing_where_mappable(&core, &wants))? {
            Ok(found) => Ok(found.into_pyobject(py)?.into_any()),
            Err(why) => Ok(PyString::new(py, &why).into_any()),
        }
    })
}

/// For each rank (wanted, read, unwanted, reads, parcels, sent, received, bytes read alone, unwanted alone, reads alone), and
/// for each node (read, read alone, sent, received).
type Table = (Vec<[u64; 10]>, Vec<[u64; 4]>);

/// Bytes that ranks read, send and receive together, and would read alone. `within_nodes`: only ranks of one node
/// read for each other. Opens no file.
#[pyfunction]
#[pyo3(signature = (checkpoint, lists, of_rank, nodes, within_nodes = false))]
pub(crate) fn traffic<'py>(
    py: Python<'py>,
    checkpoint: &Checkpoint,
    lists: Listed<PyBackedBytes>,
    of_rank: Listed<u32>,
    nodes: Listed<u32>,
    within_nodes: bool,
) -> Answer<'py, Table> {
    answer(py, || {
        let core = checkpoint.0.clone();
        let scope = if within_nodes { Scope::Node } else { Scope::World };
        detached(py, || -> penstock::Result<Table> {
            let unpacked = lists.0.iter().map(|list| packed::unpack(list, core.len() as u32));
            let lists = unpacked.collect::<penstock::Result<Vec<Vec<Want>>>>()?;
            let found = PlannedTraffic::new(&core, RankWants { lists: &lists, of_rank: &of_rank.0 }, &nodes.0, scope)?;
            let rank = |r: &OfRank| {
                let StorageReads { bytes, count, unwanted } = r.alone;
                [r.wanted, r.read, r.unwanted, r.reads, r.parcels, r.sent, r.received, bytes, unwanted, count]
            };
            let node = |n: &OfNode| [n.read, n.alone, n.sent, n.received];
            Ok((found.ranks.iter().map(rank).collect(), found.nodes.iter().map(node).collect()))
        })
    })
}

/// The wants of a rank, as bytes for the others.
#[pyfunction]
#[pyo3(signature = (checkpoint, wants, regions = None))]
pub(crate) fn pack_wants<'py>(
    py: Python<'py>,
    checkpoint: &Checkpoint,
    wants: Option<Listed<u32>>,
    regions: Option<Listed<Region>>,
) -> PyResult<Bound<'py, PyBytes>> {
    guarded(py, || Ok(PyBytes::new(py, &packed::pack(&wants_of(&checkpoint.0, wants, regions)?))))
}
