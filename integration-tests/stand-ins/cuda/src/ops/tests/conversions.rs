use super::{INTEGERS, check, evaluate, floats, triples};
use crate::ops::format::{BF16, F16, Rounding};

fn f(x: u64) -> f32 {
    f32::from_bits(x as u32)
}

fn bits(x: f32) -> u64 {
    if x.is_nan() {
        0x7fff_ffff
    } else {
        u64::from(x.to_bits())
    }
}

#[test]
fn integers_widen_by_their_sign_and_saturate_when_asked() {
    let all = triples(&INTEGERS);
    check("cvt.s64.s32 %d, %x;", &all, |[a, ..]| {
        i64::from(a as i32) as u64
    });
    check("cvt.u64.u32 %d, %x;", &all, |[a, ..]| u64::from(a as u32));
    check("cvt.s32.s16 %r, %i;", &all, |[a, ..]| {
        u64::from(i32::from(a as i16) as u32)
    });
    check("cvt.s32.s8 %r, %x;", &all, |[a, ..]| {
        u64::from(i32::from(a as i8) as u32)
    });
    check("cvt.u32.u8 %r, %x;", &all, |[a, ..]| a & 0xff);
    check("cvt.sat.s16.s32 %h, %x;", &all, |[a, ..]| {
        u64::from((a as i32).clamp(-0x8000, 0x7fff) as u16)
    });
    check("cvt.sat.u32.s64 %r, %a;", &all, |[a, ..]| {
        (a as i64).clamp(0, 0xffff_ffff) as u64
    });
}

#[test]
fn integers_become_floats_with_one_rounding() {
    let all = triples(&INTEGERS);
    check("cvt.rn.f32.u64 %r, %a;", &all, |[a, ..]| bits(a as f32));
    check("cvt.rn.f32.s32 %r, %x;", &all, |[a, ..]| {
        bits(a as i32 as f32)
    });
    check("cvt.rn.f64.s64 %d, %a;", &all, |[a, ..]| {
        (a as i64 as f64).to_bits()
    });
    check("cvt.rn.f64.u32 %d, %x;", &all, |[a, ..]| {
        f64::from(a as u32).to_bits()
    });

    check("cvt.rz.f32.u32 %r, %x;", &all, |[a, ..]| {
        let near = a as u32 as f32;
        bits(if f64::from(near) > f64::from(a as u32) {
            near.next_down()
        } else {
            near
        })
    });

    check("cvt.rn.f16.u16 %h, %i;", &all, |[a, ..]| {
        F16.narrow(f64::from(a as u16), Rounding::Nearest)
    });
}

#[test]
fn floats_become_integers_at_the_nearest_end_of_the_range() {
    let all = triples(&floats());
    // Rust's casts truncate, saturate and convert NaN to 0.
    check("cvt.rzi.s32.f32 %r, %x;", &all, |[a, ..]| {
        u64::from(f(a) as i32 as u32)
    });
    check("cvt.rzi.u32.f32 %r, %x;", &all, |[a, ..]| {
        u64::from(f(a) as u32)
    });
    check("cvt.rni.s32.f32 %r, %x;", &all, |[a, ..]| {
        u64::from(f(a).round_ties_even() as i32 as u32)
    });
    check("cvt.rmi.s32.f32 %r, %x;", &all, |[a, ..]| {
        u64::from(f(a).floor() as i32 as u32)
    });

    check("cvt.rpi.s64.f32 %d, %x;", &all, |[a, ..]| {
        if f(a).is_nan() {
            1 << 63
        } else {
            f(a).ceil() as i64 as u64
        }
    });

    check("cvt.rni.f32.f32 %r, %x;", &all, |[a, ..]| {
        bits(f(a).round_ties_even())
    });
    check("cvt.rmi.f32.f32 %r, %x;", &all, |[a, ..]| {
        bits(f(a).floor())
    });
    check("cvt.sat.f32.f32 %r, %x;", &all, |[a, ..]| {
        bits(if f(a) > 0.0 { f(a).min(1.0) } else { 0.0 })
    });
}

#[test]
fn floats_change_their_width() {
    let all = triples(&floats());
    let narrow =
        |format: crate::ops::format::Format, a: u64, how| format.narrow(f64::from(f(a)), how);
    check(
        "cvt.f64.f32 %u0, %x; cvt.rn.f32.f64 %r, %u0;",
        &all,
        |[a, ..]| bits(f(a)),
    );
    check("cvt.rn.f16.f32 %h, %x;", &all, |[a, ..]| {
        narrow(F16, a, Rounding::Nearest)
    });
    check("cvt.rz.bf16.f32 %h, %x;", &all, |[a, ..]| {
        narrow(BF16, a, Rounding::Zero)
    });
    check("cvt.rn.bf16x2.f32 %r, %x, %y;", &all, |[a, b, _]| {
        narrow(BF16, a, Rounding::Nearest) << 16 | narrow(BF16, b, Rounding::Nearest)
    });
    check("cvt.rn.f16x2.f32 %r, %x, %y;", &all, |[a, b, _]| {
        narrow(F16, a, Rounding::Nearest) << 16 | narrow(F16, b, Rounding::Nearest)
    });
    check("cvt.rna.tf32.f32 %r, %x;", &all, |[a, ..]| match f(a) {
        x if x.is_nan() => 0x7fff_e000,
        x if x.is_infinite() => a,
        _ => (a + 0x1000) & !0x1fff,
    });
    // Round trip of every f16.
    let halves: Vec<[u64; 3]> = (0..0x1_0000).map(|h| [h, 0, 0]).collect();

    for (name, format) in [("f16", F16), ("bf16", BF16)] {
        let code = format!("cvt.f32.{name} %t0, %i; cvt.rn.{name}.f32 %h, %t0;");
        for (got, &[h, ..]) in evaluate(&code, &halves).iter().zip(&halves) {
            let want = if format.widen(h).is_nan() { 0x7fff } else { h };
            assert_eq!(*got, want, "{name} {h:#x}");
        }
    }
}

#[test]
fn comparisons_know_signs_and_nan() {
    let ints = triples(&INTEGERS);
    let all = triples(&floats());
    let one = |code: &str| format!("setp.{code} %p0, %x, %y; selp.b32 %r, 1, 0, %p0;");
    check(&one("lt.s32"), &ints, |[a, b, _]| {
        u64::from((a as i32) < b as i32)
    });
    check(&one("lo.u32"), &ints, |[a, b, _]| {
        u64::from((a as u32) < b as u32)
    });
    check(&one("hs.u32"), &ints, |[a, b, _]| {
        u64::from(a as u32 >= b as u32)
    });
    check(&one("ne.b32"), &ints, |[a, b, _]| {
        u64::from(a as u32 != b as u32)
    });
    check(&one("lt.f32"), &all, |[a, b, _]| u64::from(f(a) < f(b)));
    check(&one("ltu.f32"), &all, |[a, b, _]| {
        u64::from(f(a) < f(b) || f(a).is_nan() || f(b).is_nan())
    });
    check(&one("ne.f32"), &all, |[a, b, _]| {
        u64::from(f(a) < f(b) || f(a) > f(b))
    });
    check(&one("neu.f32"), &all, |[a, b, _]| u64::from(f(a) != f(b)));
    check(&one("num.f32"), &all, |[a, b, _]| {
        u64::from(!f(a).is_nan() && !f(b).is_nan())
    });
    // Two results, and a third predicate.
    let code =
        "setp.gt.u32 %p1, %z, 100; setp.eq.and.b32 %p2|%p3, %x, %y, !%p1; selp.b32 %t0, 1, 0, %p2;
                selp.b32 %t1, 2, 0, %p3; or.b32 %r, %t0, %t1;";
    check(code, &ints, |[a, b, c]| {
        match (a as u32 == b as u32, c as u32 > 100) {
            (_, true) => 0,
            (true, _) => 1,
            _ => 2,
        }
    });

    let code = "set.le.f32.f32 %r, %x, %y;";
    check(
        code,
        &all,
        |[a, b, _]| if f(a) <= f(b) { bits(1.0) } else { 0 },
    );
    let code = "testp.subnormal.f32 %p0, %x; selp.b32 %r, 1, 0, %p0;";
    check(code, &all, |[a, ..]| u64::from(f(a).is_subnormal()));
}

#[test]
fn registers_are_packed_and_unpacked() {
    let all = triples(&INTEGERS);
    check("mov.b64 %d, {%x, %y};", &all, |[a, b, _]| {
        a & 0xffff_ffff | b << 32
    });
    check(
        "mov.b64 {%t0, %t1}, %a; mov.b64 %d, {%t1, %t0};",
        &all,
        |[a, ..]| a.rotate_left(32),
    );
    check("mov.b32 %r, {%i, %j};", &all, |[a, b, _]| {
        a & 0xffff | (b & 0xffff) << 16
    });
    check("mov.b32 {%i, %h}, %x;", &all, |[a, ..]| a >> 16 & 0xffff);
}
