package confine

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// capabilityNames are the names of <linux/capability.h>, by number.
var capabilityNames = strings.Fields(`
	CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
	NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN
	SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE
	MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE`)

// DefaultCapabilities are the capabilities of a container that asks for none: containerd's and
// Docker's.
func DefaultCapabilities() []string {
	return []string{"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "NET_RAW",
		"SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
}

// AllCapabilities are the names of all.
func AllCapabilities() []string { return slices.Clone(capabilityNames) }

// HeldCapabilities are the names of the capabilities that the caller can give to a program: in a
// container, root may have few.
func HeldCapabilities() ([]string, error) {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		return nil, fmt.Errorf("read this process's capabilities: %w", err)
	}
	var out []string
	for c, name := range capabilityNames {
		if data[c/32].Permitted&(1<<(c%32)) != 0 {
			out = append(out, name)
		}
	}
	return out, nil
}

// CapabilityName is the name of a capability.
func CapabilityName(c int) string {
	if c < 0 || c >= len(capabilityNames) {
		return fmt.Sprintf("capability %d", c)
	}
	return "CAP_" + capabilityNames[c]
}

// Capability returns the number of a capability, named with or without CAP_.
func Capability(name string) (int, error) {
	i := slices.Index(capabilityNames, strings.TrimPrefix(strings.ToUpper(name), "CAP_"))
	if i < 0 {
		return 0, fmt.Errorf("capability %q is not known", name)
	}
	return i, nil
}

// KnownCapabilities are the numbers of the kernel's capabilities.
func KnownCapabilities() []uintptr {
	var out []uintptr
	for c := range capabilityNames {
		if _, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0); err == nil {
			out = append(out, uintptr(c))
		}
	}
	return out
}
