//! Counters of a server, as Prometheus reads them.

use crate::answer::STATUSES;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub(crate) struct Metrics {
    requests: [AtomicU64; STATUSES.len()],
    pub(crate) sent_bytes: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) accepted: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) late: AtomicU64,
    pub(crate) changed: AtomicU64,
}

pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Metrics {
    pub(crate) fn answered(&self, status: u16) {
        if let Some(at) = STATUSES.iter().position(|(known, _)| *known == status) {
            add(&self.requests[at], 1);
        }
    }

    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        let mut family = |name: &str, kind: &str, help: &str, samples: &[(String, u64)]| {
            let _ = writeln!(text, "# HELP penstock_serve_{name} {help}\n# TYPE penstock_serve_{name} {kind}");
            for (labels, value) in samples {
                let _ = writeln!(text, "penstock_serve_{name}{labels} {value}");
            }
        };
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let by_status =
            |((status, _), counter): (&(u16, &str), &AtomicU64)| (format!("{{status=\"{status}\"}}"), value(counter));
        let requests: Vec<_> = STATUSES.iter().zip(&self.requests).map(by_status).collect();
        family("requests_total", "counter", "Requests that were answered, by status.", &requests);
        for (name, kind, help, counter) in [
            ("sent_bytes_total", "counter", "Bytes of heads and bodies that were sent.", &self.sent_bytes),
            ("connections", "gauge", "Connections that are open.", &self.connections),
            ("accepted_total", "counter", "Connections that were accepted.", &self.accepted),
            ("refused_total", "counter", "Connections that were closed at once: there were too many.", &self.refused),
            ("late_total", "counter", "Connections that were closed because nothing moved.", &self.late),
            ("changed_total", "counter", "Answers that were cut because the file changed.", &self.changed),
        ] {
            family(name, kind, help, &[(String::new(), value(counter))]);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_status() {
        let metrics = Metrics::default();
        metrics.answered(206);
        metrics.answered(206);
        add(&metrics.sent_bytes, 7);
        let text = metrics.text();
        assert!(text.contains("penstock_serve_requests_total{status=\"206\"} 2\n"), "{text}");
        assert!(text.contains("\npenstock_serve_sent_bytes_total 7\n") && text.ends_with('\n'), "{text}");
    }
}
