// Package connect translates the addresses of Services when a program of this machine
// connects: by programs on a control group, ahead of every packet filter. README.md has
// the contract of its maps.
//
// The object program_bpfel.o is compiled from bpf/connect.c by 'make bpf'.
package connect

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Config is where the programs are attached and kept.
type Config struct {
	// Cgroup is the control group, version 2, whose processes' connections are translated; empty
	// stands for the top of the hierarchy.
	Cgroup string
	// FS is where a BPF file system is mounted; empty stands for DefaultFS.
	FS string
}

// DefaultFS is where systemd mounts the BPF file system.
const DefaultFS = "/sys/fs/bpf"

func (c *Config) complete() error {
	if c.FS == "" {
		c.FS = DefaultFS
	}
	if c.Cgroup != "" {
		return checkGroup(c.Cgroup)
	}
	top, err := topGroup()
	c.Cgroup = top
	return err
}

// topGroup returns where the hierarchy of version 2 is mounted. BPF needs none of its controllers.
func topGroup() (string, error) {
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		if checkGroup(dir) != nil {
			continue
		}
		// Only the real top has no type: in a container the hierarchy begins at the container's own group.
		if _, err := os.Stat(filepath.Join(dir, "cgroup.type")); err == nil {
			return "", fmt.Errorf("%s is not the top of the machine's control groups but the group of a container, whose processes are "+
				"few: mount the machine's /sys/fs/cgroup into the container, and name it with --connect-time-cgroup", dir)
		}
		return dir, nil
	}
	return "", errors.New("control groups of version 2 are not mounted at /sys/fs/cgroup or /sys/fs/cgroup/unified: mount them " +
		"('mount -t cgroup2 none DIR'), and name the place with --connect-time-cgroup")
}

func checkGroup(dir string) error {
	return checkFS(dir, unix.CGROUP2_SUPER_MAGIC, "a control group of version 2")
}

func checkFS(dir string, magic int64, what string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("%s is not %s: %w", dir, what, err)
	}
	if int64(st.Type) != magic { //nolint:unconvert // 32 bits wide on some architectures
		return fmt.Errorf("%s is not %s", dir, what)
	}
	return nil
}

// dir is where the maps and links of the network namespace with a cookie are pinned.
func (c *Config) dir(cookie uint64) string {
	return filepath.Join(c.FS, "fairlead", fmt.Sprintf("connect-%d", cookie))
}

// Cookie returns the cookie of the network namespace of the calling thread, which no other
// namespace has had or will have until the machine starts again.
func Cookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open a socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("read the cookie of the network namespace (Linux 5.14): %w", err)
	}
	return cookie, nil
}

// explain adds to an error of BPF what to do about it.
func explain(what string, err error) error {
	var verifier *ebpf.VerifierError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("cannot %s: %w: run as root, or with the capabilities CAP_BPF, CAP_NET_ADMIN and CAP_SYS_ADMIN", what, err)
	case errors.As(err, &verifier):
		return fmt.Errorf("cannot %s: the kernel refuses the program (Linux 5.14 or newer takes it): %s", what, oneLine(verifier))
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, unix.EINVAL):
		return fmt.Errorf("cannot %s: %w: it takes Linux 5.14 or newer, with CONFIG_CGROUP_BPF", what, err)
	}
	return fmt.Errorf("cannot %s: %w", what, err)
}

// oneLine returns the summary of the error, which may have several lines.
func oneLine(v *ebpf.VerifierError) string {
	return strings.ReplaceAll(v.Error(), "\n", " ")
}

func as16(a netip.Addr) programAddress {
	b := a.As16()
	var out programAddress
	for i := range out.Word {
		out.Word[i] = native.Uint32(b[4*i:])
	}
	return out
}

func addrOf(a programAddress) netip.Addr {
	var b [16]byte
	for i, w := range a.Word {
		native.PutUint32(b[4*i:], w)
	}
	return netip.AddrFrom16(b).Unmap()
}
