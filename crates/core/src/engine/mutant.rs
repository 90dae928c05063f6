//! Seeded mistakes of the engine, for the simulator to catch. None in any build but the tests'.

/// Makes an enum with a list of its variants, so that none can be forgotten.
macro_rules! listed {
    ($(#[$about:meta])* enum $name:ident { $($(#[$why:meta])* $variant:ident,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum $name { $($(#[$why])* $variant,)* }

        impl $name {
            pub(crate) const ALL: &[$name] = &[$($name::$variant,)*];
        }
    };
}

pub(super) use listed;

listed! {
    /// One mistake. One that no `mutated!` commits is one that the simulator does not catch.
    enum Mutant {
        // Copies and slabs.
        ReleaseSlabBeforeCopy,
        SkipCopy,
        CopyTwice,
        StartExtentTwice,
        StartBeforeGrant,
        ForgetWantedBlock,
        IgnoreDepth,
        AcceptShortRead,
        AcceptDoubleCompletion,
        // The window of a stream.
        IgnoreWindow,
        WindowOfLargest,
        WindowForWhatIsHandedOut,
        HaltAtLargeTensor,
        NeverShrinkWindow,
        // Failure and the drain that follows it.
        SwallowReadError,
        SwallowCopyError,
        SwallowSlabError,
        GoOnAfterSlabError,
        ContinueAfterFailure,
        EndBeforeDrained,
        IgnoreCancel,
        LeakSlabOnFailure,
        SourceIsNotTold,
        DrainForEver,
        AbandonAtOnce,
        DrainAnewWithEveryCompletion,
        ReleaseQuarantinedSlab,
        BelieveLateEcho,
        // The stall.
        NeverStall,
        StallWhileConsumerIsAwaited,
        StallForgetsProgress,
        StallForgetsStarts,
        StallForgetsBytes,
        StallCountsConsumersTime,
        StallAnewWithEveryWake,
        StallBeforeItLooks,
        StallNamesNewest,
        // Hand-out.
        ReadyAfterFirstExtent,
        LoseReady,
        HandOutOfOrder,
        HandOutTwice,
        HandOutAfterFailure,
        CompleteBlockEarly,
        NeverCompleteBlock,
        IgnoreLateRevocation,
        // Arrival.
        TakeSlabAtRequest,
        LandBeforeArrival,
        LoseArrivalWithoutSlab,
        QueueArrivalTwice,
        LandLastArrivalFirst,
        LandAfterFailure,
        LeakSlabOfFailedArrival,
        RequestBeforeGrant,
        IgnoreRequestBound,
        ReadsTakeSlabsOfArrivals,
        DoneBeforeLanded,
        // Reads for which the source had no room.
        LoseHeldBack,
        SendHeldBackTwice,
        SendHeldBackAfterFailure,
        RetryWithoutTurn,
        OvertakeHeldBack,
        NeverWithdrawHeldBack,
        // What a load that failed has overwritten.
        ForgetTornReads,
        TearFailedReadWhole,
        TearFailedCopyWhole,
        TouchWhileReading,
        ForgetHung,
        IgnoreNeverBegun,
        // What several ranks want.
        IgnoreSentBound,
        ForgetSentSlab,
        SentArrivalsBlockOthers,
        CountWholeParcels,
        PeersExcuseOwnStall,
        PeersDoNotMove,
    }
}

impl Mutant {
    /// Mistakes that show only if ranks load together: `load/simulator` catches them, `engine/simulator` the others.
    pub(crate) const OF_RANKS: &[Mutant] = &[
        Mutant::IgnoreSentBound,
        Mutant::ForgetSentSlab,
        Mutant::SentArrivalsBlockOthers,
        Mutant::CountWholeParcels,
        Mutant::PeersExcuseOwnStall,
        Mutant::PeersDoNotMove,
    ];
}
