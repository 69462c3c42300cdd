package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The network of a run: hosts on one switch. The API server and the
// measurement itself run in the namespace of the switch.
const (
	switchAddr   = "192.168.88.1"
	backendsAddr = "192.168.88.2"
	firstHost    = 10 // the last byte of the first host's address
	lastHost     = 250
	// endpointRange holds the addresses of all endpoints. One host answers for
	// every one of them.
	endpointRange = "10.128.0.0/9"
	backendPort   = 9376
)

// network makes hosts.
type network struct{ count int }

// host is a network namespace with one interface, eth0, on the switch.
type host struct {
	name string
	addr netip.Addr
	file *os.File
}

// ip runs one line of ip(8).
func ip(ctx context.Context, line string) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "ip", strings.Fields(line)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", line, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// newNetwork makes the switch and the host that answers for all endpoints.
func newNetwork(ctx context.Context) (*network, error) {
	for _, line := range []string{
		"link set lo up",
		"link add switch type bridge",
		"addr add " + switchAddr + "/24 dev switch",
		"link set switch up",
	} {
		if err := ip(ctx, line); err != nil {
			return nil, err
		}
	}
	n := &network{}
	b, err := n.attach(ctx, "backends", netip.MustParseAddr(backendsAddr))
	if err != nil {
		return nil, err
	}
	// Addresses without a Service are refused at once, as a router does it: a
	// connection tried before its Service is programmed must not hang.
	for key, value := range map[string]string{"net/ipv4/ip_forward": "1", "net/ipv4/icmp_ratelimit": "0"} {
		if err := b.sysctl(key, value); err != nil {
			return nil, err
		}
	}
	if err := ip(ctx, "-n backends route add local "+endpointRange+" dev lo"); err != nil {
		return nil, err
	}
	return n, serveBackends(b)
}

// host makes a further host, whose way to all endpoints and to everything
// unknown leads over the backends' host.
func (n *network) host(ctx context.Context, name string) (*host, error) {
	if firstHost+n.count > lastHost {
		return nil, errors.New("too many hosts")
	}
	a := netip.MustParseAddr(switchAddr).As4()
	a[3] = byte(firstHost + n.count)
	n.count++
	h, err := n.attach(ctx, name, netip.AddrFrom4(a))
	if err != nil {
		return nil, err
	}
	return h, ip(ctx, "-n "+name+" route add default via "+backendsAddr)
}

func (n *network) attach(ctx context.Context, name string, addr netip.Addr) (*host, error) {
	port := "p" + fmt.Sprint(addr.As4()[3])
	for _, line := range []string{
		"netns add " + name,
		"link add " + port + " type veth peer name eth0 netns " + name,
		"link set " + port + " master switch up",
		"-n " + name + " link set lo up",
		fmt.Sprintf("-n %s addr add %s/24 dev eth0", name, addr),
		"-n " + name + " link set eth0 up",
	} {
		if err := ip(ctx, line); err != nil {
			return nil, err
		}
	}
	f, err := os.Open("/run/netns/" + name)
	if err != nil {
		return nil, err
	}
	return &host{name: name, addr: addr, file: f}, nil
}

// end stops the process of the host, nil if none was started, and takes the host away, also after an interrupt.
func (h *host) end(ctx context.Context, p *process) error {
	var err error
	if p != nil {
		err = p.stop()
	}
	return errors.Join(err, h.remove(context.WithoutCancel(ctx)))
}

// remove takes the host away. What still runs on it keeps the namespace.
func (h *host) remove(ctx context.Context) error {
	_ = h.file.Close()
	err := ip(ctx, "link del p"+fmt.Sprint(h.addr.As4()[3]))
	return errors.Join(err, ip(ctx, "netns del "+h.name))
}

// on runs f on the host and waits for it: on its own thread, which ends
// with f.
func (h *host) on(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread dies here
		if err := unix.Setns(int(h.file.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter host %s: %w", h.name, err)
			return
		}
		done <- f()
	}()
	return <-done
}

func (h *host) sysctl(key, value string) error {
	return h.on(func() error { return os.WriteFile("/proc/sys/"+key, []byte(value), 0) })
}

// dial opens a connection from the host, for clients of packages.
func (h *host) dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = h.on(func() error {
		var d net.Dialer
		var err error
		c, err = d.DialContext(ctx, network, address)
		return err
	})
	return c, err
}
