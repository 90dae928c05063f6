//! Reads, copies and parcels: what the engine of a rank asks for, and what becomes of it.

use super::*;

impl World<'_> {
    /// The read of an extent of this rank's own has ended.
    pub(super) fn read_ends(&mut self, rank: u32, extent: u32) {
        let e = &self.case.schedules[rank as usize].extents[extent as usize];
        let r = &mut self.ranks[rank as usize];
        if r.hangs || !r.reading.remove(&extent) {
            return;
        }
        let failed = std::mem::take(&mut r.fails);
        let result = match failed {
            true => Err(Error::new(ErrorKind::Io, "simulated")),
            false => Ok(e.len),
        };
        if !failed {
            self.bytes_read[rank as usize] += e.len;
            if let Some(InCommon::Sent(parcel)) = e.shared {
                self.parcels_read.entry(parcel).or_default().push(rank);
            }
        }
        r.engine.on(self.now, Event::ReadDone(ticket(extent), result, e.len));
        self.turn(rank);
    }

    /// If a parcel was both sent and copied, its slab is free.
    pub(super) fn batch_ends(&mut self, rank: u32, extent: u32) {
        let r = &mut self.ranks[rank as usize];
        if r.sending.get(&extent).is_some_and(|sending| sending.left == 0 && sending.copied) {
            r.sending.remove(&extent);
            r.engine.on(self.now, Event::CopyDone(ticket(extent), Ok(()), Vec::new()));
        }
    }

    /// Gives the kernel what it takes.
    pub(super) fn pump(&mut self, from: u32, to: u32) {
        let r = &self.ranks[from as usize];
        if r.life != Life::Runs || r.failure.is_some() {
            return;
        }
        while self.ranks[from as usize].on_the_way[to as usize] < KERNEL {
            let Some((extent, parcel, nbytes)) = self.ranks[from as usize].out[to as usize].pop_front() else { return };
            self.ranks[from as usize].on_the_way[to as usize] += nbytes;
            let (source, target) = (self.node_of(from) as usize, self.node_of(to) as usize);
            let (left, comes) = if source == target {
                let left = self.nodes[source][3].carry(self.now, nbytes);
                (left, left)
            } else {
                let left = self.nodes[source][1].carry(self.now, nbytes);
                (left, self.nodes[target][2].carry(left, nbytes).max(left) + self.machines.latency)
            };
            self.push(left, Step::Left { from, to, extent });
            self.push(comes, Step::Comes { from, to, parcel, nbytes });
        }
    }

    /// Takes what has come from a rank, as far as it has a place.
    pub(super) fn receive(&mut self, rank: u32, from: u32) {
        loop {
            let r = &mut self.ranks[rank as usize];
            if r.failure.is_some() || r.phase != Phase::Loads {
                return;
            }
            let Some(&(parcel, nbytes)) = r.come[from as usize].front() else { return };
            let Some(awaiting) = r.awaited.get_mut(&parcel) else { return };
            let extent = awaiting.extent;
            if !awaiting.has_place {
                if !std::mem::replace(&mut awaiting.told, true) {
                    r.engine.on(self.now, Event::Arrived(ticket(extent)));
                }
                return;
            }
            r.come[from as usize].pop_front();
            r.awaited.remove(&parcel);
            let len = self.case.schedules[rank as usize].extents[extent as usize].len;
            if len != nbytes {
                self.fault = Some(format!("{nbytes} bytes of parcel {parcel} come, and rank {rank} wants {len}"));
            }
            if !self.received.insert((parcel, rank)) {
                self.fault = Some(format!("parcel {parcel} comes twice to rank {rank}"));
            }
            r.engine.on(self.now, Event::ReadDone(ticket(extent), Ok(len), len));
            self.on(rank, from, Heard::Parcel);
            self.ranks[from as usize].on_the_way[rank as usize] -= nbytes;
            self.pump(from, rank);
        }
    }

    pub(super) fn carry_out(&mut self, rank: u32, action: Action) {
        let now = self.now;
        match action {
            Action::Read { extent } => {
                let e = self.case.schedules[rank as usize].extents[extent as usize].clone();
                if let Some(InCommon::Received { parcel, .. }) = e.shared {
                    let reader = self.case.shares.parcels()[parcel as usize].reader;
                    let awaiting = Awaiting { extent, has_place: e.landing != Landing::Slab, told: false };
                    if self.ranks[rank as usize].awaited.insert(parcel, awaiting).is_some() {
                        self.fault = Some(format!("rank {rank} awaits parcel {parcel} twice"));
                    }
                    if self.ranks[rank as usize].failure.is_some() {
                        return;
                    }
                    return self.receive(rank, reader);
                }
                let r = &mut self.ranks[rank as usize];
                r.reading.insert(extent);
                if matches!(e.shared, Some(InCommon::Sent(_))) && !e.lands_on_arrival() {
                    r.held.insert(extent);
                }
                let node = r.node as usize;
                let ends = self.storage.carry(now, e.len).max(self.nodes[node][0].carry(now, e.len));
                let ends = ends + self.machines.first_byte;
                match e.lands_on_arrival() {
                    true => self.push(ends, Step::Arrives(rank, extent)),
                    false => self.push(ends, Step::ReadEnds(rank, extent)),
                }
            }
            Action::Land { extent } => {
                let e = &self.case.schedules[rank as usize].extents[extent as usize];
                match e.shared {
                    Some(InCommon::Received { parcel, .. }) => {
                        let reader = self.case.shares.parcels()[parcel as usize].reader;
                        if let Some(awaiting) = self.ranks[rank as usize].awaited.get_mut(&parcel) {
                            awaiting.has_place = true;
                        }
                        self.receive(rank, reader);
                    }
                    shared => {
                        if shared.is_some() {
                            self.ranks[rank as usize].held.insert(extent);
                        }
                        self.push(now, Step::ReadEnds(rank, extent));
                    }
                }
            }
            Action::Copy { extent } => self.copy(rank, extent),
            Action::Withdraw { .. } => {}
            Action::Cancel => {
                let r = &mut self.ranks[rank as usize];
                let awaited = std::mem::take(&mut r.awaited);
                let cancelled = || Error::new(ErrorKind::Cancelled, "simulated");
                for awaiting in awaited.values() {
                    r.engine.on(now, Event::ReadDone(ticket(awaiting.extent), Err(cancelled()), 0));
                }
                if !r.hangs {
                    // What the kernel has taken back, or finished.
                    for extent in std::mem::take(&mut r.reading) {
                        r.engine.on(now, Event::ReadDone(ticket(extent), Err(cancelled()), 0));
                    }
                }
                let error = r.failure.clone().unwrap_or_else(cancelled);
                self.send_nothing(rank, &error);
            }
            Action::Abandon => drop(self.ranks[rank as usize].engine.take_quarantined()),
        }
    }

    pub(super) fn copy(&mut self, rank: u32, extent: u32) {
        let e = self.case.schedules[rank as usize].extents[extent as usize].clone();
        let ends = self.devices[rank as usize].carry(self.now, if e.pieces.is_empty() { 0 } else { e.wanted });
        let Some(InCommon::Sent(number)) = e.shared else { return self.push(ends, Step::CopyEnds(rank, extent)) };
        if let Some(failure) = self.ranks[rank as usize].failure.clone() {
            let failed = Event::CopyDone(ticket(extent), Err(failure), Vec::new());
            return self.ranks[rank as usize].engine.on(self.now, failed);
        }
        let parcel = &self.case.shares.parcels()[number as usize];
        // The kernel serves connections side by side. Here each rank begins with the next one, so that not all send to one first.
        let count = self.ranks.len() as u32;
        let mut others: Vec<u32> =
            self.case.shares.audience(parcel).iter().copied().filter(|other| *other != rank).collect();
        others.sort_unstable_by_key(|other| (other + count - rank) % count);
        let mut sending = Sending::default();
        let replicas = self.case.of_rank.iter().all(|list| *list == 0);
        for &to in &others {
            // All bytes are wanted by replicas. That is said here because a thousand of them would ask a thousand times.
            let nbytes = match replicas {
                true => parcel.end - parcel.start,
                false => rows(&self.case.shares, self.case.checkpoint, number, to).0,
            };
            if nbytes > 0 {
                self.ranks[rank as usize].out[to as usize].push_back((extent, number, nbytes));
                sending.left += 1;
            }
        }
        self.push(ends, Step::CopyEnds(rank, extent));
        self.ranks[rank as usize].sending.insert(extent, sending);
        others.into_iter().for_each(|to| self.pump(rank, to));
    }

    /// Fails all sends of a rank.
    pub(super) fn send_nothing(&mut self, rank: u32, error: &Error) {
        let r = &mut self.ranks[rank as usize];
        r.out.iter_mut().for_each(VecDeque::clear);
        for (extent, _) in std::mem::take(&mut r.sending) {
            r.engine.on(self.now, Event::CopyDone(ticket(extent), Err(error.clone()), Vec::new()));
        }
    }
}
