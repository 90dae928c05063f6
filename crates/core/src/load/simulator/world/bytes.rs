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
        let Some(Sending { copied: true, sent: Some(sent), .. }) = r.sending.get(&extent) else { return };
        let sent = sent.clone();
        r.sending.remove(&extent);
        r.engine.on(self.now, Event::CopyDone(ticket(extent), sent, Vec::new()));
    }

    /// The bytes that a rank wants of a parcel.
    pub(super) fn wanted(&self, number: u32, rank: u32) -> u64 {
        // All bytes are wanted by replicas. That is said here because a thousand of them would ask a thousand times.
        if self.case.of_rank.iter().all(|list| *list == 0) {
            let parcel = &self.case.shares.parcels()[number as usize];
            return parcel.end - parcel.start;
        }
        rows(&self.case.shares, self.case.checkpoint, number, rank).0
    }

    /// A parcel has come to a rank.
    pub(super) fn comes(&mut self, rank: u32, parcel: u32) {
        if !self.received.insert((parcel, rank)) {
            self.fault = Some(format!("parcel {parcel} comes twice to rank {rank}"));
        }
    }

    /// Gives the kernel what it takes.
    pub(super) fn pump(&mut self, from: u32, to: u32) {
        let r = &self.ranks[from as usize];
        if r.life != Life::Runs || r.is_quiet() {
            return;
        }
        while self.ranks[from as usize].on_the_way[to as usize] < self.kernel {
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
            self.push(left, Step::Left { from, to, extent, parcel });
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
            r.loans.received(parcel);
            let len = self.case.schedules[rank as usize].extents[extent as usize].len;
            r.engine.on(self.now, Event::ReadDone(ticket(extent), Ok(len), len));
            let wanted = self.wanted(parcel, rank);
            if wanted != nbytes {
                self.fault = Some(format!("{nbytes} bytes of parcel {parcel} come, and rank {rank} wants {wanted}"));
            }
            self.comes(rank, parcel);
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
                    return match self.ranks[rank as usize].loans.awaits(parcel) {
                        Some(slab) => self.borrow(rank, parcel, slab),
                        None => self.receive(rank, reader),
                    };
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
                r.gave_up = true;
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
            Action::Abandon => {
                let r = &mut self.ranks[rank as usize];
                r.engine.take_quarantined().iter_mut().for_each(Held::set_apart);
                r.sending.clear();
            }
        }
    }

    pub(super) fn copy(&mut self, rank: u32, extent: u32) {
        let e = self.case.schedules[rank as usize].extents[extent as usize].clone();
        let ends = self.devices[rank as usize].carry(self.now, if e.pieces.is_empty() { 0 } else { e.wanted });
        self.push(ends, Step::CopyEnds(rank, extent));
        let r = &mut self.ranks[rank as usize];
        match r.engine.slab(extent).map(|held| held.slab) {
            Some(slab) => {
                self.book.borrow_mut().begins(slab, rank, SlabUse::Copies);
                r.copying.insert(extent, slab);
            }
            None => self.fault = Some(format!("rank {rank} copies extent {extent} out of no slab")),
        }
        let Some(InCommon::Sent(number)) = e.shared else { return };
        let sending = Sending { parcel: number, sent: r.failure.clone().map(Err), copied: false };
        if r.sending.entry(extent).or_insert(sending).sent.is_some() {
            return;
        }
        let parcel = &self.case.shares.parcels()[number as usize];
        // The kernel serves connections side by side. Here each rank begins with the next one, so that not all send to one first.
        let count = self.ranks.len() as u32;
        let others = self.case.shares.audience(parcel).iter().copied();
        let others = others.filter(|other| *other != rank && self.wanted(number, *other) > 0);
        let mut others: Vec<usize> = others.map(|other| other as usize).collect();
        others.sort_unstable_by_key(|other| (*other as u32 + count - rank) % count);
        match others[..] {
            [] => {
                if let Some(sending) = self.ranks[rank as usize].sending.get_mut(&extent) {
                    sending.sent = Some(Ok(()));
                }
            }
            _ => self.lend(rank, (number, extent), &others),
        }
    }
}
