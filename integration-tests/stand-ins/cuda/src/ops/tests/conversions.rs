use super::{INTEGERS, bits, check, evaluate, f, floats, triples};
use crate::ops::format::{BF16, F16};

#[test]
fn integers_widen_by_their_sign() {
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
}

#[test]
fn floats_change_their_width() {
    let all = triples(&floats());
    let narrow = |format: crate::ops::format::Format, a: u64| format.narrow(f64::from(f(a)));
    check(
        "cvt.f64.f32 %u0, %x; cvt.rn.f32.f64 %r, %u0;",
        &all,
        |[a, ..]| bits(f(a)),
    );
    check("cvt.rn.f16.f32 %h, %x;", &all, |[a, ..]| narrow(F16, a));
    check("cvt.rn.bf16.f32 %h, %x;", &all, |[a, ..]| narrow(BF16, a));
    check("cvt.rn.bf16x2.f32 %r, %x, %y;", &all, |[a, b, _]| {
        narrow(BF16, a) << 16 | narrow(BF16, b)
    });
    check("cvt.rn.f16x2.f32 %r, %x, %y;", &all, |[a, b, _]| {
        narrow(F16, a) << 16 | narrow(F16, b)
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
