//! Bad arguments: the same errors on every device, before anything runs.

use std::sync::Arc;

use half::bf16;
use zero_alloc::device::{
    AnySlice, DType, Device, DeviceError, DeviceId, DeviceKind, DeviceSlice, Element,
};
use zero_kernels::step::{StepConfig, StepRecord, StepState};
use zero_kernels::{
    AdvanceArgs, Argument, GradStats, KernelError, MatrixRows, RankStats, Rounding, Segments,
    StepScalars, UpdateArgs, UpdateRule, Weights,
};

use crate::Rig;
use crate::common::hyper;

fn length(what: impl Into<Argument>, expected: usize, got: usize) -> Result<(), KernelError> {
    Err(KernelError::LengthMismatch {
        what: what.into(),
        expected,
        got,
    })
}

fn unsupported(what: &'static str, dtype: DType) -> Result<(), KernelError> {
    Err(KernelError::Unsupported { what, dtype })
}

fn overlap(first: impl Into<Argument>, second: &'static str) -> Result<(), KernelError> {
    Err(KernelError::Overlap {
        first: first.into(),
        second: second.into(),
    })
}

fn another_device<D: Device>(
    rig: &Rig<D>,
    what: &'static str,
    got: DeviceId,
) -> Result<(), KernelError> {
    let host = rig.device.kind() == DeviceKind::Host;
    let expected = if host {
        DeviceId::HOST
    } else {
        rig.device.id()
    };
    Err(DeviceError::AnotherDevice {
        what,
        expected,
        got,
    }
    .into())
}

/// The same address, of a device that does not exist.
fn elsewhere<T>(slice: DeviceSlice<T>) -> DeviceSlice<T> {
    let device = DeviceId::new(DeviceKind::Simulated).expect("an id");
    // SAFETY: the launch is rejected before it accesses memory.
    unsafe { DeviceSlice::from_raw_parts(slice.as_ptr(), slice.len(), device) }
}

/// The same address as elements of another type.
fn cast<T: Element, U>(slice: DeviceSlice<T>, len: usize) -> DeviceSlice<U> {
    // SAFETY: the launch is rejected before it accesses memory.
    unsafe { DeviceSlice::from_raw_parts(slice.as_ptr().cast(), len, slice.device()) }
}

pub fn bad_arguments_of_updates<D: Device>(rig: &Rig<D>) {
    let master = rig.buffer(&[1f32; 8], 0);
    let m = rig.buffer(&[0f32; 8], 0);
    let v = rig.buffer(&[0f32; 8], 0);
    let grad = rig.buffer(&[0f32; 8], 0);
    let scalars = rig.buffer(&[StepScalars::skipped()], 0);
    let doubles = rig.buffer(&[0f64; 8], 0);

    let good = UpdateArgs {
        weights: Weights::Fp32 {
            master: master.slice(),
            param_out: None,
        },
        slots: vec![m.slice().into(), v.slice().into()],
        grad: grad.any(),
        scalars: scalars.slice(),
        weight_decay: 0.1,
        rounding: Rounding::Nearest,
    };

    let rule: Arc<dyn UpdateRule> = Arc::new(hyper(true));
    let run = |change: &dyn Fn(&mut UpdateArgs)| {
        let mut args = good.clone();
        change(&mut args);
        rig.kernels.update(&rig.stream, &rule, args)
    };
    let to_param = |param: AnySlice| {
        run(&|args| {
            args.weights = Weights::Fp32 {
                master: master.slice(),
                param_out: Some(param),
            }
        })
    };

    assert_eq!(
        run(&|args| args.grad = grad.any().slice(0..7)),
        length("update: grad", 8, 7)
    );
    for (slot, name) in ["first_moment", "second_moment"].into_iter().enumerate() {
        assert_eq!(
            run(&|args| args.slots[slot] = args.slots[slot].slice(0..7)),
            length(Argument::Slot(name), 8, 7)
        );
        assert_eq!(
            length(Argument::Slot(name), 8, 7).unwrap_err().to_string(),
            format!("update: {name}: expected 8 elements, got 7")
        );
    }
    assert_eq!(
        run(&|args| args.slots.truncate(1)),
        length("update: slots", 2, 1)
    );
    assert_eq!(
        to_param(doubles.any().slice(0..7)),
        length("update: param_out", 8, 7)
    );
    assert_eq!(
        run(&|args| args.scalars = args.scalars.slice(0..0)),
        length("update: scalars", 1, 0)
    );

    assert_eq!(
        run(&|args| args.grad = doubles.any()),
        unsupported("update: grad", DType::F64)
    );
    assert_eq!(
        to_param(doubles.any()),
        unsupported("update: param_out", DType::F64)
    );

    assert_eq!(
        to_param(master.any()),
        overlap("update: master", "update: param_out")
    );
    assert_eq!(
        run(&|args| args.grad = v.any()),
        overlap(Argument::Slot("second_moment"), "update: grad")
    );
    assert_eq!(
        run(&|args| args.scalars = cast(m.slice(), 1)),
        overlap(Argument::Slot("first_moment"), "update: scalars")
    );

    // SAFETY: within `doubles`; the launch is rejected before it accesses memory.
    let askew = unsafe {
        AnySlice::from_raw_parts(
            doubles.any().as_ptr().wrapping_add(1),
            8,
            DType::Bf16,
            rig.device.id(),
        )
    };

    let error = run(&|args| args.grad = askew).unwrap_err();
    let address = askew.as_ptr() as usize;

    assert_eq!(
        error,
        KernelError::Misaligned {
            what: "update: grad".into(),
            address,
            align_bytes: 2
        }
    );

    let other = elsewhere(master.slice());
    let on_other = |what| another_device(rig, what, other.device());
    assert_eq!(
        run(&|args| args.grad = other.erase()),
        on_other("update: grad")
    );
    assert_eq!(
        run(&|args| {
            args.weights = Weights::Fp32 {
                master: other,
                param_out: None,
            }
        }),
        on_other("update: master")
    );

    run(&|_| ()).unwrap();
    assert_eq!(
        master.read(),
        [1.0; 8],
        "the stream is fine, and the step was a skipped one"
    );
}

pub fn bad_arguments_of_updates_with_remainders<D: Device>(rig: &Rig<D>) {
    let weights = rig.buffer(&[bf16::ONE; 8], 0);
    let r = rig.buffer(&[0i16; 8], 0);
    let m = rig.buffer(&[0f32; 8], 0);
    let v = rig.buffer(&[0f32; 8], 0);
    let grad = rig.buffer(&[0f32; 8], 0);
    let scalars = rig.buffer(&[StepScalars::skipped()], 0);
    let param = weights.slice();
    let remainder = r.slice();

    let rule: Arc<dyn UpdateRule> = Arc::new(hyper(true));
    let run = |param, remainder| {
        let args = UpdateArgs {
            weights: Weights::Remainder { param, remainder },
            slots: vec![m.slice().into(), v.slice().into()],
            grad: grad.any(),
            scalars: scalars.slice(),
            weight_decay: 0.1,
            rounding: Rounding::Nearest,
        };
        rig.kernels.update(&rig.stream, &rule, args)
    };

    assert_eq!(
        run(param, remainder.slice(0..7)),
        length("update: remainder", 8, 7)
    );
    assert_eq!(
        run(param, cast(param, 8)),
        overlap("update: param", "update: remainder")
    );
    let other = elsewhere(param);
    assert_eq!(
        run(other, remainder),
        another_device(rig, "update: param", other.device())
    );
    run(param, remainder).unwrap();
    assert_eq!(weights.read(), [bf16::ONE; 8]);
}

pub fn bad_arguments_of_flat_operations<D: Device>(rig: &Rig<D>) {
    let stream = &rig.stream;
    let kernels = &rig.kernels;
    let floats = rig.buffer(&[1f32; 8], 0);
    let doubles = rig.buffer(&[0f64; 8], 0);
    let all = floats.any();
    assert_eq!(
        kernels.cast(stream, all, doubles.any(), 1.0),
        unsupported("cast: dst", DType::F64)
    );
    assert_eq!(
        kernels.cast(stream, doubles.any(), all, 1.0),
        unsupported("cast: src", DType::F64)
    );
    assert_eq!(
        kernels.cast(stream, all, all, 1.0),
        overlap("cast: dst", "cast: src")
    );
    assert_eq!(
        kernels.cast(stream, all, all.slice(1..3), 1.0),
        length("cast: dst", 8, 2)
    );

    let rows = |range, stride| MatrixRows {
        data: all.slice(range),
        stride,
    };
    let cast_rows = |src, dst| kernels.cast_rows(stream, src, dst, [2, 2], 1.0);
    assert_eq!(cast_rows(rows(0..4, 2), rows(4..8, 2)), Ok(()));
    assert_eq!(
        cast_rows(rows(0..4, 1), rows(4..8, 2)),
        length("cast_rows: src: stride", 2, 1)
    );
    assert_eq!(
        cast_rows(rows(0..4, 2), rows(4..8, 3)),
        length("cast_rows: dst", 5, 4)
    );
    assert_eq!(
        cast_rows(rows(0..5, 3), rows(4..8, 2)),
        overlap("cast_rows: dst", "cast_rows: src")
    );
    let of_doubles = MatrixRows {
        data: doubles.any().slice(0..4),
        stride: 2,
    };
    assert_eq!(
        cast_rows(of_doubles, rows(4..8, 2)),
        unsupported("cast_rows: src", DType::F64)
    );

    let acc = floats.slice();
    assert_eq!(
        kernels.accumulate(stream, doubles.any(), acc),
        unsupported("accumulate: grad", DType::F64)
    );
    assert_eq!(
        kernels.accumulate(stream, all, acc.slice(0..1)),
        length("accumulate: acc", 8, 1)
    );
    assert_eq!(
        kernels.accumulate(stream, all, acc),
        overlap("accumulate: acc", "accumulate: grad")
    );

    let segments = Segments {
        start: 0,
        len: 2,
        stride: 4,
        count: 2,
    };

    let pack = |parts: &[_], dst| kernels.pack(stream, parts, segments, dst);
    let part = all.slice(0..4);
    let bucket = all.slice(4..8);
    assert_eq!(pack(&[(part, 0)], all), length("pack: dst", 4, 8));
    assert_eq!(
        pack(&[(part, 0)], all.slice(3..7)),
        overlap("pack: dst", "pack: part")
    );
    assert_eq!(
        pack(&[(part, 0), (part, 3)], bucket),
        Err(KernelError::PartOrder { index: 1 })
    );
    assert_eq!(
        pack(&[(doubles.any(), 0)], bucket),
        unsupported("pack: part", DType::F64)
    );
    assert_eq!(
        pack(&[(part, 0)], doubles.any().slice(0..4)),
        unsupported("pack: dst", DType::F64)
    );
    let endless = Segments {
        start: usize::MAX,
        ..segments
    };

    assert_eq!(
        kernels.pack(stream, &[(part, 0)], endless, bucket),
        length("pack: dst", usize::MAX, 4)
    );

    let out = rig.poisoned::<GradStats>(2, 0);
    let scratch = rig.poisoned::<f64>(kernels.stats_scratch_elems(&[8]), 0);
    let one = out.slice().slice(0..1);
    let two = out.slice();
    let scratch = scratch.slice();
    assert_eq!(
        kernels.grad_stats(stream, &[all], scratch, two),
        length("grad_stats: out", 1, 2)
    );
    let wide = kernels.grad_stats(stream, &[doubles.any()], scratch, one);
    assert_eq!(wide, unsupported("grad_stats: grad", DType::F64));
    let shared = kernels.grad_stats(stream, &[all], scratch, cast(acc, 1));
    assert_eq!(shared, overlap("grad_stats: out", "grad_stats: grad"));
    let needed = kernels.stats_scratch_elems(&[8]);

    if needed > 0 {
        let short = kernels.grad_stats(stream, &[all], scratch.slice(0..needed - 1), one);
        assert_eq!(short, length("grad_stats: scratch", needed, needed - 1));
    }

    let other = elsewhere(floats.slice());
    let grad = other.erase();
    let on_other = |what| another_device(rig, what, other.device());
    assert_eq!(kernels.cast(stream, grad, all, 1.0), on_other("cast: src"));
    assert_eq!(kernels.cast(stream, all, grad, 1.0), on_other("cast: dst"));
    assert_eq!(
        kernels.accumulate(stream, grad, acc),
        on_other("accumulate: grad")
    );
    assert_eq!(
        kernels.accumulate(stream, all, other),
        on_other("accumulate: acc")
    );
    assert_eq!(
        kernels.grad_stats(stream, &[grad], scratch, one),
        on_other("grad_stats: grad")
    );
    assert_eq!(floats.read(), [1.0; 8]);
}

pub fn bad_arguments_of_step_operations<D: Device>(rig: &Rig<D>) {
    let words = rig.buffer(&[0f64; 40], 0);
    let records = rig.poisoned::<StepRecord>(1, 0);
    let scalars = rig.poisoned::<StepScalars>(1, 0);
    let ranks = rig.buffer(&[RankStats::new(&[], 0.0)], 0);
    let all = words.slice();
    let config: DeviceSlice<StepConfig> = cast(all, 1);
    let state: DeviceSlice<StepState> = cast(all.slice(10..20), 1);

    let good = AdvanceArgs {
        ranks: ranks.slice(),
        config,
        rates: cast(all.slice(30..33), 1),
        state,
        scalars: scalars.slice(),
        records: records.slice(),
    };

    let run = |args: AdvanceArgs| rig.kernels.advance_step(&rig.stream, args);
    let empty = AdvanceArgs {
        ranks: ranks.slice().slice(0..0),
        ..good
    };

    assert_eq!(run(empty), length("advance_step: ranks", 1, 0));
    let empty = AdvanceArgs {
        records: records.slice().slice(0..0),
        ..good
    };

    assert_eq!(run(empty), length("advance_step: records", 1, 0));
    let two = rig.poisoned::<StepScalars>(2, 0);
    let odd = AdvanceArgs {
        scalars: two.slice(),
        ..good
    };

    assert_eq!(run(odd), length("advance_step: rates", 2, 1));
    assert_eq!(
        run(AdvanceArgs {
            state: cast(all.slice(10..31), 3),
            ..good
        }),
        length("advance_step: state", 1, 3)
    );

    let shared = AdvanceArgs {
        state: cast(all, 1),
        ..good
    };

    assert_eq!(
        run(shared),
        overlap("advance_step: state", "advance_step: config")
    );
    let units = rig.buffer(&[GradStats::default()], 0);

    let stats = |loss, out| {
        rig.kernels.rank_stats(
            &rig.stream,
            units.slice(),
            loss,
            cast(all.slice(9..10), 1),
            out,
        )
    };

    assert_eq!(stats(all, ranks.slice()), length("rank_stats: loss", 1, 40));
    assert_eq!(
        stats(all.slice(0..1), cast(all, 1)),
        overlap("rank_stats: out", "rank_stats: loss")
    );
    let other = elsewhere(all.slice(0..1));
    assert_eq!(
        stats(other, ranks.slice()),
        another_device(rig, "rank_stats: loss", other.device())
    );
    let state = elsewhere(good.state);
    let on_other = another_device(rig, "advance_step: state", state.device());
    assert_eq!(run(AdvanceArgs { state, ..good }), on_other);
    assert_eq!(words.read(), [0.0; 40]);
}
