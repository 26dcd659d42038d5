//! The limits on the memory of this process: the machine's free memory, control groups (versions 1
//! and 2, the whole path of the process) and resource limits. Linux only. A file that cannot be
//! read sets no limit.

use std::path::{Path, PathBuf};

/// The quantity that a limit bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LimitKind {
    /// Memory in use.
    Memory,
    /// Mapped addresses, in use or not.
    Addresses,
}

/// A limit, and what it leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    /// Its name for the user.
    pub(crate) name: String,
    pub(crate) free_bytes: u64,
    pub(crate) kind: LimitKind,
}

/// All limits that could be read below `root`, which is `/` except in tests.
pub(crate) fn limits(root: &Path) -> Vec<Limit> {
    let read = |file: &str| std::fs::read_to_string(root.join(file)).unwrap_or_default();
    let (meminfo, status) = (read("proc/meminfo"), read("proc/self/status"));
    let swap_bytes = kib(&meminfo, "SwapFree:").unwrap_or(0);
    let mut limits = Vec::new();
    if let Some(available) = kib(&meminfo, "MemAvailable:") {
        let free_bytes = available.saturating_add(swap_bytes);
        limits.push(Limit {
            name: "this machine".to_owned(),
            free_bytes,
            kind: LimitKind::Memory,
        });
    }

    for (resource, used, name) in [
        (
            "Max address space",
            "VmSize:",
            "the limit of address space (ulimit -v, RLIMIT_AS)",
        ),
        (
            "Max data size",
            "VmData:",
            "the limit of data (ulimit -d, RLIMIT_DATA)",
        ),
    ] {
        if let (Some(limit), Some(used)) = (
            number(&read("proc/self/limits"), resource),
            kib(&status, used),
        ) {
            let free_bytes = limit.saturating_sub(used);
            limits.push(Limit {
                name: name.to_owned(),
                free_bytes,
                kind: LimitKind::Addresses,
            });
        }
    }

    let (groups, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    limits.extend(
        mounts
            .lines()
            .filter_map(Hierarchy::of_mount)
            .flat_map(|h| h.limits(root, &groups, swap_bytes)),
    );

    limits
}

/// The memory of the machine below `root`.
pub(crate) fn machine_bytes(root: &Path) -> Option<u64> {
    kib(
        &std::fs::read_to_string(root.join("proc/meminfo")).ok()?,
        "MemTotal:",
    )
}

/// The most memory that this process has held so far.
pub(crate) fn resident_peak_bytes() -> Option<u64> {
    kib(
        &std::fs::read_to_string("/proc/self/status").ok()?,
        "VmHWM:",
    )
}

/// The largest cache of the machine, or 32 MiB if that is unknown.
pub(crate) fn cache_bytes(root: &Path) -> u64 {
    let size = |index: u8| {
        let path = root.join(format!(
            "sys/devices/system/cpu/cpu0/cache/index{index}/size"
        ));
        std::fs::read_to_string(path)
            .ok()?
            .trim()
            .strip_suffix('K')?
            .parse::<u64>()
            .ok()?
            .checked_mul(1024)
    };
    (0..5).filter_map(size).max().unwrap_or(32 << 20)
}

/// The first number after `key` on its line.
fn number(text: &str, key: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix(key))?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

/// A line in KiB, in bytes.
fn kib(text: &str, key: &str) -> Option<u64> {
    number(text, key)?.checked_mul(1024)
}

/// A mounted hierarchy of control groups that may limit memory.
struct Hierarchy<'a> {
    version: u8,
    /// The group that is mounted.
    group: &'a Path,
    mount_point: &'a Path,
}

impl<'a> Hierarchy<'a> {
    /// From a line of mountinfo (man 5 proc_pid_mountinfo).
    fn of_mount(line: &'a str) -> Option<Self> {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let version = match (right.next()?, right.next_back()?) {
            ("cgroup2", _) => 2,
            ("cgroup", options) if options.split(',').any(|option| option == "memory") => 1,
            _ => return None,
        };
        let mut left = left.split(' ').skip(3).map(Path::new);
        Some(Self {
            version,
            group: left.next()?,
            mount_point: left.next()?,
        })
    }

    /// The folder of the group of this process, by the lines `ID:CONTROLLERS:PATH` of
    /// /proc/self/cgroup.
    fn folder(&self, groups: &str) -> Option<PathBuf> {
        let path = groups.lines().find_map(|line| {
            let (_, line) = line.split_once(':')?;
            let (controllers, path) = line.split_once(':')?;
            let is_ours = match self.version {
                1 => controllers
                    .split(',')
                    .any(|controller| controller == "memory"),
                _ => controllers.is_empty(),
            };
            is_ours.then_some(path)
        })?;

        // In a container the path may be outside of what is mounted; then the mounted group is the
        // process's.
        let inside = Path::new(path)
            .strip_prefix(self.group)
            .unwrap_or(Path::new(""));
        let is_below = inside
            .components()
            .all(|part| matches!(part, std::path::Component::Normal(_)));

        Some(if is_below {
            self.mount_point.join(inside)
        } else {
            self.mount_point.to_owned()
        })
    }

    /// The limits of the group and of those above it.
    fn limits(self, root: &Path, groups: &str, swap_bytes: u64) -> Vec<Limit> {
        let Some(folder) = self.folder(groups) else {
            return Vec::new();
        };
        let groups = folder
            .ancestors()
            .take_while(|group| group.starts_with(self.mount_point));
        groups
            .filter_map(|group| self.limit(root, group, swap_bytes))
            .collect()
    }

    /// The limit of one group, less what it uses and the kernel cannot reclaim.
    fn limit(&self, root: &Path, group: &Path, swap_bytes: u64) -> Option<Limit> {
        let path = |file: &str| {
            root.join(group.strip_prefix("/").unwrap_or(group))
                .join(file)
        };

        let read = |file: &str| std::fs::read_to_string(path(file)).ok();
        let value = |file: &str| read(file)?.trim().parse::<u64>().ok();
        let (limit, used, cached): (_, _, &[&str]) = match self.version {
            1 => (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                &["total_active_file ", "total_inactive_file "],
            ),
            _ => (
                "memory.max",
                "memory.current",
                &["active_file ", "inactive_file ", "slab_reclaimable "],
            ),
        };

        let stat = read("memory.stat").unwrap_or_default();
        let reclaimable: u64 = cached.iter().filter_map(|key| number(&stat, key)).sum();
        let left = |limit: u64, used: u64| limit.saturating_sub(used.saturating_sub(reclaimable));
        let memory = left(value(limit)?, value(used)?);
        let free_bytes = match self.version {
            1 => {
                let with_swap = memory.saturating_add(swap_bytes);
                let both =
                    value("memory.memsw.limit_in_bytes").zip(value("memory.memsw.usage_in_bytes"));
                both.map_or(with_swap, |(limit, used)| with_swap.min(left(limit, used)))
            }
            _ => {
                let swap = value("memory.swap.max").zip(value("memory.swap.current"));
                memory.saturating_add(swap.map_or(swap_bytes, |(limit, used)| {
                    limit.saturating_sub(used).min(swap_bytes)
                }))
            }
        };

        let name = format!("the control group's limit {}", group.join(limit).display());
        Some(Limit {
            name,
            free_bytes,
            kind: LimitKind::Memory,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of files.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    /// The free bytes under the limit whose name contains `name`.
    fn free(files: &[(&str, &str)], name: &str) -> Option<u64> {
        limits(tree(files).path())
            .into_iter()
            .find(|limit| limit.name.contains(name))
            .map(|limit| limit.free_bytes)
    }

    const MOUNT_2: (&str, &str) = (
        "proc/self/mountinfo",
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n",
    );

    #[test]
    fn free_memory_and_swap_of_the_machine() {
        let machine = |text| free(&[("proc/meminfo", text)], "this machine");
        let text =
            "MemTotal:       24689052 kB\nMemAvailable:   18874368 kB\nSwapFree:        1024 kB\n";
        assert_eq!(machine(text), Some((18_874_368 + 1024) * 1024));
        assert_eq!(machine("MemAvailable:   8 kB\n"), Some(8192));
        for none in [
            "",
            "MemTotal: 8 kB\n",
            "MemAvailable: many kB\n",
            "MemAvailable: 18446744073709551615 kB\n",
        ] {
            assert_eq!(machine(none), None, "{none}");
        }
        assert_eq!(limits(Path::new("/nowhere")), []);
        #[cfg(target_os = "linux")]
        assert!(
            limits(Path::new("/"))
                .iter()
                .any(|limit| limit.kind == LimitKind::Memory && limit.free_bytes > 0)
        );
    }

    #[test]
    fn largest_cache_is_found() {
        let cache = "sys/devices/system/cpu/cpu0/cache";
        let files = [
            (format!("{cache}/index0/size"), "32K\n"),
            (format!("{cache}/index3/size"), "32768K\n"),
        ];
        assert_eq!(
            cache_bytes(tree(&files.each_ref().map(|(path, text)| (&**path, *text))).path()),
            32 << 20
        );
        assert_eq!(cache_bytes(Path::new("/nowhere")), 32 << 20);
    }

    #[test]
    fn resource_limits_count_what_is_mapped() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                      Max data size             1000000              unlimited            bytes     \n\
                      Max address space         838860800            unlimited            bytes     \n";
        let files = [
            ("proc/self/limits", limits),
            (
                "proc/self/status",
                "Name:\tzero\nVmSize:\t  100 kB\nVmData:\t 2000 kB\n",
            ),
        ];

        assert_eq!(free(&files, "ulimit -v"), Some(838_860_800 - 102_400));
        assert_eq!(
            free(&files, "ulimit -d"),
            Some(0),
            "more is mapped than the limit"
        );
        let unlimited = limits.replace("838860800", "unlimited");
        assert_eq!(
            free(&[("proc/self/limits", &unlimited), files[1]], "ulimit -v"),
            None
        );
    }

    #[test]
    fn every_group_of_the_path_limits_version_2() {
        let files = [
            MOUNT_2,
            ("proc/self/cgroup", "0::/a.slice/job\n"),
            ("sys/fs/cgroup/a.slice/memory.max", "1000\n"),
            ("sys/fs/cgroup/a.slice/memory.current", "700\n"),
            (
                "sys/fs/cgroup/a.slice/memory.stat",
                "anon 100\nactive_file 30\ninactive_file 60\nslab_reclaimable 10\n",
            ),
            ("sys/fs/cgroup/a.slice/job/memory.max", "max\n"),
            ("sys/fs/cgroup/a.slice/job/memory.current", "500\n"),
        ];

        assert_eq!(
            free(&files, "/sys/fs/cgroup/a.slice/memory.max"),
            Some(400),
            "what is used and not cached counts"
        );
        assert_eq!(limits(tree(&files).path()).len(), 1, "`max` is no limit");
        let swap = [("proc/meminfo", "SwapFree: 1 kB\n")];
        assert_eq!(
            free(&[&files[..], &swap].concat(), "memory.max"),
            Some(400 + 1024)
        );
        let limited = [
            ("sys/fs/cgroup/a.slice/memory.swap.max", "9\n"),
            ("sys/fs/cgroup/a.slice/memory.swap.current", "2\n"),
        ];
        assert_eq!(
            free(&[&files[..], &swap, &limited].concat(), "memory.max"),
            Some(400 + 7)
        );
    }

    #[test]
    fn group_of_a_container_is_the_mounted_one() {
        let limit = [
            ("sys/fs/cgroup/memory.max", "1000\n"),
            ("sys/fs/cgroup/memory.current", "1\n"),
            ("proc/meminfo", ""),
        ];
        let mount = "30 23 0:26 /docker/x /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n";
        for group in ["0::/docker/x\n", "0::/\n", "0::/../other\n"] {
            let files = [
                &limit[..],
                &[("proc/self/mountinfo", mount), ("proc/self/cgroup", group)],
            ]
            .concat();
            assert_eq!(
                free(&files, "/sys/fs/cgroup/memory.max"),
                Some(999),
                "{group}"
            );
        }
    }

    #[test]
    fn group_limits_version_1() {
        let mount = "31 24 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                     32 24 0:32 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        let folder = "sys/fs/cgroup/memory/job";
        let at = |file: &str| format!("{folder}/{file}");
        let [limit, used, stat] = [
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "memory.stat",
        ]
        .map(at);

        let files = [
            ("proc/self/mountinfo", mount),
            (
                "proc/self/cgroup",
                "9:name=systemd:/\n4:memory:/job\n0::/\n",
            ),
            ("proc/meminfo", "SwapFree: 1 kB\n"),
            (&*limit, "1000\n"),
            (&*used, "900\n"),
            (&*stat, "total_active_file 100\ntotal_inactive_file 200\n"),
        ];

        assert_eq!(
            free(&files, "/sys/fs/cgroup/memory/job/memory.limit_in_bytes"),
            Some(400 + 1024)
        );
        let [limit, used] = ["memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"].map(at);
        let swap = [(&*limit, "1000\n"), (&*used, "950\n")];
        assert_eq!(
            free(&[&files[..], &swap].concat(), "limit_in_bytes"),
            Some(350)
        );
    }
}
