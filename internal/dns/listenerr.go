package dns

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"syscall"
)

// listenError returns err with what to do about it.
func listenError(a netip.AddrPort, err error) error {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("dns: %s is in use by another program; stop it or give another address with --listen", a)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("dns: cannot listen on %s: the address is not assigned to this machine", a)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("dns: port %d needs root or CAP_NET_BIND_SERVICE", a.Port())
	case errors.Is(err, syscall.EAFNOSUPPORT):
		return fmt.Errorf("dns: cannot listen on %s: %w", a, errNoFamily)
	}
	return fmt.Errorf("dns: cannot listen on %s: %w", a, err)
}
