//! Host access to ranges of the state.

use zero_alloc::device::DType;
use zero_alloc::host::HostDevice;
use zero_optim::{GroupRules, OptimizerConfig, StateKind, StateRange};

use crate::common::{Holding, KINDS, LIMIT, Random, Rank, RankOf};

fn range(kind: StateKind, unit: usize, elems: std::ops::Range<usize>) -> StateRange {
    StateRange { kind, unit, elems }
}

/// Two units of 8 and 4 elements; elements 2..5 of the first and all of the second are frozen.
fn rank(dtype: DType) -> Rank {
    let mut random = Random(1);
    let init = [random.values(8), random.values(4)];
    let group = |unit, elem| usize::from(unit == 1 || (2..5).contains(&elem));
    let rules = [GroupRules::default(), GroupRules::frozen()];
    let rank = RankOf {
        config: &OptimizerConfig::default(),
        dtype,
        init: &init,
        place: (0, 1),
        how: Holding::Shard,
        rules: &rules,
        group_of: &group,
    };
    rank.build(HostDevice::new(), |builder| builder).unwrap()
}

#[test]
fn ranges_round_trip() {
    let dtypes = if cfg!(miri) {
        &[DType::Bf16][..]
    } else {
        &[DType::F32, DType::Bf16, DType::F16]
    };

    for &dtype in dtypes {
        let mut rank = rank(dtype);
        let params = rank.slices();
        for kind in KINDS {
            for (unit, len) in [(0, 8), (1, 4)] {
                // Exact in fp16 and bf16.
                let values: Vec<f32> = (0..len).map(|i| (i + 8 * unit + 1) as f32).collect();
                let all = range(kind, unit, 0..len);
                rank.optim
                    .write_state(&rank.stream, &all, &params[unit], &values, LIMIT)
                    .unwrap();
                for (start, end) in
                    (0..=len).flat_map(|start| (start..=len).map(move |end| (start, end)))
                {
                    let mut read = vec![f32::NAN; end - start];
                    let part = range(kind, unit, start..end);
                    rank.optim
                        .read_state(&rank.stream, &part, &params[unit], &mut read, LIMIT)
                        .unwrap();
                    let frozen = |i| unit == 1 || (2..5).contains(&i);
                    let expected = |i| {
                        if kind != StateKind::Master && frozen(i) {
                            0.0
                        } else {
                            values[i]
                        }
                    };
                    assert_eq!(
                        read,
                        (start..end).map(expected).collect::<Vec<_>>(),
                        "{dtype} {part:?}"
                    );
                }
            }
        }
        rank.write_params();
        assert_eq!(
            rank.params[0].values(),
            [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
        );
        assert_eq!(rank.params[1].values(), [9.0, 10.0, 11.0, 12.0]);
    }
}

#[test]
fn written_weights_are_rounded() {
    let mut rank = rank(DType::Bf16);
    let params = rank.slices();
    let all = range(StateKind::Master, 0, 0..8);
    let x = 1.0 + f32::EPSILON;
    rank.optim
        .write_state(&rank.stream, &all, &params[0], &[x; 8], LIMIT)
        .unwrap();
    let mut read = [0.0; 8];
    rank.optim
        .read_state(&rank.stream, &all, &params[0], &mut read, LIMIT)
        .unwrap();
    assert_eq!(
        read,
        [x, x, 1.0, 1.0, 1.0, x, x, x],
        "frozen weights are the bf16 parameters"
    );
}

#[test]
fn parameters_may_lie_in_pieces() {
    for dtype in [DType::F32, DType::F16] {
        let mut rank = rank(dtype);
        let param = rank.params[0].slice();
        let pieces = [
            (param.slice(0..3), 0),
            (param.slice(3..4), 3),
            (param.slice(4..8), 4),
        ];
        let part = range(StateKind::Master, 0, 1..7);
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        rank.optim
            .write_state(&rank.stream, &part, &pieces, &values, LIMIT)
            .unwrap();
        let mut read = [0.0; 6];
        rank.optim
            .read_state(&rank.stream, &part, &[(param, 0)], &mut read, LIMIT)
            .unwrap();
        assert_eq!(read, values);
    }
}

#[test]
fn wrong_ranges_are_rejected() {
    let mut rank = rank(DType::F32);
    let param = [(rank.params[0].slice(), 0)];
    let mut out = [0.0; 8];
    let mut refused = |range: StateRange, param: &[_], len: usize, expected: &str| {
        let out = &mut out[..len];
        let read = rank
            .optim
            .read_state(&rank.stream, &range, param, out, LIMIT);
        assert_eq!(read.unwrap_err().to_string(), expected);
    };

    let kind = StateKind::Slot("first_moment");
    let of = |elems| range(kind, 0, elems);
    refused(
        range(kind, 2, 0..1),
        &param,
        1,
        "there is no unit 2: the optimizer has 2 units, numbered from 0",
    );
    let past = "unit unit0, first_moment: there are no elements 7..9 in a segment of 8";
    refused(of(7..9), &param, 2, past);
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = of(3..2);
    let no_elements = "unit unit0, first_moment: there are no elements 3..2 in a segment of 8";
    refused(reversed, &param, 0, no_elements);
    let length = "unit unit0, first_moment: expected 3 elements, got 2";
    refused(of(0..3), &param, 2, length);

    let short = [(param[0].0.slice(0..7), 0)];
    let missing = "unit unit0, params: expected 8 elements, got 7";
    refused(of(0..3), &short, 3, missing);
    let mut other = crate::common::Buffer::new(&[0.0; 8], DType::Bf16);
    let dtypes = "unit unit0, params: expected fp32, got bf16";
    refused(of(0..3), &[(other.slice(), 0)], 3, dtypes);
}
