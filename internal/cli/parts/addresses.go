package parts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"syscall"
	"time"

	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/kernel/link"
)

// MachineAddresses returns the addresses at which others reach this machine, one of
// each family: the source addresses of packets to server, if there is one.
func MachineAddresses(server []netip.Addr) ([]netip.Addr, error) {
	var peer netip.Addr
	if len(server) > 0 {
		peer = server[0]
	}
	out, err := link.MachineAddrs(peer)
	if err == nil && len(out) == 0 {
		err = errors.New("this machine has no address that others reach (loopback, bridges, docker and fairlead do not count): " +
			"give one to an interface, or name it with --node-ip")
	}
	return out, err
}

// ServerAddrs returns the addresses of the server behind cfg.
func ServerAddrs(cfg *rest.Config, log *slog.Logger) []netip.Addr {
	u, _, err := rest.DefaultServerUrlFor(cfg)
	if err != nil {
		return nil // kubernetes.NewForConfig has rejected it
	}
	if a, err := netip.ParseAddr(u.Hostname()); err == nil {
		return []netip.Addr{a.Unmap()}
	}
	ctx, cancel := context.WithTimeout(context.Background(), resolveTimeout)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", u.Hostname())
	if err != nil {
		log.Warn("cannot resolve the server's name: routes to Pods are not checked against its address", "server", u.Host, "err", err)
	}
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	return addrs
}

// resolveTimeout bounds how long a start waits for the server's addresses.
const resolveTimeout = 5 * time.Second

// Listen listens on at; flag is the one that chooses the port.
func Listen(at netip.AddrPort, flag string) (*net.TCPListener, error) {
	l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("cannot listen on %s: the port is taken; stop the program that has it, or choose another with %s", at, flag)
	}
	if err != nil {
		return nil, fmt.Errorf("cannot listen on %s: %w", at, err)
	}
	return l, nil
}
