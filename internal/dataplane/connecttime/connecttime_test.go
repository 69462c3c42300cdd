package connecttime

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/kernel/connect"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

var (
	web4 = flows.AP("10.96.0.10:80")
	web6 = flows.AP("[fd00:10:96::10]:80")
)

// web is a Table with a Service of both families whose endpoints are called names, in the node's network.
func web(e *flows.Env, names ...string) *table.Table {
	var ports []*table.ServicePort
	for _, at := range []netip.AddrPort{web4, web6} {
		f := svc.FamilyOf(at.Addr())
		var list []table.Endpoint
		for _, name := range names {
			h := e.Host(name)
			list = append(list, table.Endpoint{Addr: netip.AddrPortFrom(h.Addr(f), 9376), Local: h.Node() == e.Node})
		}
		for _, p := range []svc.Protocol{svc.TCP, svc.UDP} {
			ports = append(ports, flows.Port("web", strings.ToLower(p.String()), f, p, table.Frontend{Addr: at, Endpoints: list}))
		}
	}
	return table.New(ports...)
}

// asked returns who answers, and whether the node's connection tracking has seen a connection to the Service.
func asked(t testing.TB, e *flows.Env, p svc.Protocol, from string, to netip.AddrPort) (testbed.Answer, bool) {
	t.Helper()
	e.Forget(t)
	got, err := e.Host(from).Ask(t.Context(), p, to)
	if err != nil {
		t.Fatalf("%s to %s: %v", from, to, err)
	}
	return got, e.Node.Tracks(p, to) == nil
}

// Connections of the node and its Pods reach their endpoints without a translation that is tracked; all others are nft's.
func TestTranslated(t *testing.T) { behind(t, testTranslated) }

func testTranslated(t *testing.T, r rig) {
	e := flows.NewEnv(t, r.createKnown)
	e.Apply(t, web(e, "a"), nil)
	for _, to := range []netip.AddrPort{web4, web6} {
		for _, c := range []struct {
			from     string
			protocol svc.Protocol
			tracked  bool
		}{
			{"node", svc.TCP, false},
			{"b", svc.TCP, false},
			{"c", svc.TCP, false},
			{"a", svc.TCP, true}, // may be sent to itself
			{"client", svc.TCP, true},
			{"other", svc.TCP, true},
			{"node", svc.UDP, false},
			{"b", svc.UDP, false},
			{"a", svc.UDP, true},
			{"other", svc.UDP, true},
		} {
			if _, tracked := asked(t, e, c.protocol, c.from, to); tracked != c.tracked {
				t.Errorf("%s to %s from %s: tracked %v, want %v", c.protocol, to, c.from, tracked, c.tracked)
			}
		}
		r.group.Outside(func() {
			if _, tracked := asked(t, e, svc.TCP, "node", to); !tracked {
				t.Errorf("to %s from outside of the group: not translated by nft", to)
			}
		})
		at := netip.AddrPortFrom(e.Node.Addr(svc.FamilyOf(to.Addr())), 0)
		e.Forget(t)
		if _, err := e.Node.AskFrom(t.Context(), svc.TCP, at, to); err != nil || e.Node.Tracks(svc.TCP, to) != nil {
			t.Errorf("to %s from an address chosen before: %v, or not left to nft", to, err)
		}
		c, err := e.Node.Dial(t.Context(), svc.TCP, to)
		if err != nil {
			t.Fatal(err)
		}
		if c.RemoteAddr().String() != to.String() {
			t.Errorf("getpeername says %s, want %s", c.RemoteAddr(), to)
		}
		_ = c.Close()
	}
}

// The programs translate every kind of address themselves: nft would answer, too.
func TestTranslatedKinds(t *testing.T) { behind(t, translatedKinds) }

func translatedKinds(t *testing.T, r rig) {
	e := flows.NewEnv(t, r.createKnown)
	at := []table.Endpoint{{Addr: netip.AddrPortFrom(e.Host("a").Addr4(), 9376), Local: true}}
	external, balancer := flows.AP("192.0.2.177:80"), flows.AP("192.0.2.178:80")
	local, loopback := netip.AddrPortFrom(e.Node.Addr4(), 30080), flows.AP("127.0.0.1:30080")
	tab := table.New(flows.Port("web", "", svc.IPv4, svc.TCP,
		table.Frontend{Addr: web4, Endpoints: at},
		table.Frontend{Kind: table.ExternalIP, Addr: external, Endpoints: at},
		table.Frontend{Kind: table.LoadBalancerIP, Addr: balancer, Drop: true, LocalClients: at}, // policy Local, no endpoint here
		table.Frontend{Kind: table.NodePort, Addr: flows.AP("0.0.0.0:30080"), Endpoints: at}))
	tab.NodePortAddrs = []netip.Addr{loopback.Addr(), local.Addr()}
	e.Apply(t, tab, nil)
	for _, c := range []struct {
		from string
		to   netip.AddrPort
	}{{"node", web4}, {"node", external}, {"node", balancer}, {"node", local}, {"node", loopback}, {"b", external}, {"b", local}} {
		if got, tracked := asked(t, e, svc.TCP, c.from, c.to); tracked || got.Name != "a" {
			t.Errorf("%s to %s: answered by %s, tracked %v", c.from, c.to, got.Name, tracked)
		}
	}
}

// A socket of IPv6 that connects to an IPv4 address is translated as one of IPv4, and shows the Service's address.
func TestMappedAddress(t *testing.T) {
	e := flows.NewEnv(t, newRig(t).create)
	e.Apply(t, web(e, "a"), nil)
	e.Node.Do(func() {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Close(fd) }()
		to := unix.SockaddrInet6{Addr: web4.Addr().As16(), Port: 80}
		if err := unix.Connect(fd, &to); err != nil {
			t.Fatal(err)
		}
		peer, err := unix.Getpeername(fd)
		if is, ok := peer.(*unix.SockaddrInet6); err != nil || !ok || is.Addr != to.Addr || is.Port != to.Port {
			t.Errorf("getpeername says %+v, %v", peer, err)
		}
	})
	if e.Node.Tracks(svc.TCP, web4) == nil {
		t.Error("it was translated by nft")
	}
}

// A socket that has been connected to a Service, and then is to something else, shows what it is connected to.
func TestConnectAgain(t *testing.T) {
	e := flows.NewEnv(t, newRig(t).create)
	e.Apply(t, web(e, "a"), nil)
	direct := unix.SockaddrInet4{Addr: e.Host("b").Addr4().As4(), Port: 9376}
	e.Node.Do(func() {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Close(fd) }()
		if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: web4.Addr().As4(), Port: 80}); err != nil {
			t.Fatal(err)
		}
		// connect(2): AF_UNSPEC ends the association.
		if err := disconnect(fd); err != nil {
			t.Fatal(err)
		}
		if err := unix.Connect(fd, &direct); err != nil {
			t.Fatal(err)
		}
		peer, err := unix.Getpeername(fd)
		if is, ok := peer.(*unix.SockaddrInet4); err != nil || !ok || is.Addr != direct.Addr || is.Port != direct.Port {
			t.Errorf("getpeername says %+v, %v, want %+v", peer, err, direct.Addr)
		}
	})
}

// A restart and the time without a process change nothing: programs, maps and the numbers of lists stay. Then the next
// process goes on from there.
func TestRestart(t *testing.T) {
	r := newRig(t)
	e := flows.NewEnv(t, r.create)
	e.Apply(t, web(e, "a", "d"), nil)
	before := routes(t, e, r)
	if len(before) != 4 {
		t.Fatalf("%d frontends are installed, want 4: %v", len(before), before)
	}
	if err := e.Dataplane.Close(); err != nil {
		t.Fatal(err)
	}
	if _, tracked := asked(t, e, svc.TCP, "node", web4); tracked {
		t.Error("without a process nft translates")
	}
	e.Node.Do(func() { e.Dataplane = r.create(t, e.Node) })
	e.Apply(t, web(e, "a", "d"), nil)
	after := routes(t, e, r)
	for f, route := range before {
		if after[f] != route {
			t.Errorf("%v leads to %+v, before the restart to %+v", f, after[f], route)
		}
	}
	e.Apply(t, web(e, "b"), nil)
	got, tracked := asked(t, e, svc.TCP, "node", web4)
	if got.Name != "b" || tracked {
		t.Errorf("after the restart and a change: reached %s, tracked %v", got.Name, tracked)
	}
}

// routes are the frontends that the pinned maps have.
func routes(t testing.TB, e *flows.Env, r rig) map[connect.Front]connect.Route {
	t.Helper()
	out := map[connect.Front]connect.Route{}
	e.Node.Do(func() {
		p, err := connect.Open(r.cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = p.Close() }()
		if err := p.Fronts(func(f connect.Front, r connect.Route) { out[f] = r }); err != nil {
			t.Fatal(err)
		}
	})
	return out
}

// Cleanup leaves nothing, and nft goes on.
func TestCleanup(t *testing.T) { behind(t, testCleanup) }

func testCleanup(t *testing.T, r rig) {
	e := flows.NewEnv(t, r.create)
	e.Apply(t, web(e, "a"), nil)
	if _, tracked := asked(t, e, svc.TCP, "node", web4); tracked {
		t.Fatal("the programs are not attached")
	}
	e.Node.Do(func() {
		for _, want := range []bool{true, false} {
			if present, err := connect.Present(r.cfg.FS); present != want || err != nil {
				t.Errorf("present: %t, %v, want %t", present, err, want)
			}
			if err := connect.Cleanup(r.cfg.FS); err != nil {
				t.Error(err)
			}
		}
	})
	if left, _ := filepath.Glob(filepath.Join(r.cfg.FS, "fairlead*")); len(left) != 0 {
		t.Errorf("left behind: %q", left)
	}
	if err := e.Dataplane.Close(); err != nil {
		t.Error(err)
	}
	e.Node.Do(func() { e.Dataplane = dataplane.Applier(nothing{}) })
	if _, tracked := asked(t, e, svc.TCP, "node", web4); !tracked {
		t.Error("a connection was translated after the programs were removed")
	}
}

// nothing is an Applier in the place of one that is closed.
type nothing struct{ dataplane.Applier }

func (nothing) Close() error { return nil }

// Whatever changes at the same time, no connection to a Service with an endpoint fails, or reaches one that it never had.
func TestChangesUnderLoad(t *testing.T) {
	e := flows.NewEnv(t, newRig(t).createKnown)
	tables := []*table.Table{e.Stable(), web(e, "a"), web(e, "b", "d"), e.Stable()}
	var keys []table.Key
	for _, tab := range tables {
		for p := range tab.All() {
			keys = append(keys, p.Key())
		}
	}
	e.Apply(t, e.Stable(), nil)
	e.UnderLoad(t, func() {
		for i := range 200 {
			e.Apply(t, tables[i%len(tables)], keys)
		}
	})
}

// What is not certain stays with nft: a client that is the machine's in a group, but in a network of its own.
func TestOtherNetworks(t *testing.T) {
	r := newRig(t)
	e := flows.NewEnv(t, r.create)
	e.Apply(t, web(e, "a"), nil)
	ctx, stop := context.WithCancel(t.Context())
	cmd := e.Other.Command(ctx, self(t))
	cmd.Env = append(os.Environ(), callEnv+"="+web4.String())
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		stop()
		_ = cmd.Wait()
	}()
	testbed.Until(t, "the other machine to be looked at", func() error {
		if all, pods := looked(e.Dataplane); all == 0 || pods != 0 {
			return fmt.Errorf("%d namespaces were looked at, %d are Pods'", all, pods)
		}
		return nil
	})
	if _, tracked := asked(t, e, svc.TCP, "other", web4); !tracked {
		t.Error("another machine's connection was translated")
	}
}

func TestRefusals(t *testing.T) {
	r := newRig(t)
	for name, c := range map[string]struct {
		cfg  connect.Config
		want string
	}{
		"no group":       {connect.Config{Cgroup: "/nowhere", FS: r.cfg.FS}, "/nowhere is not a control group"},
		"another group":  {connect.Config{Cgroup: t.TempDir(), FS: r.cfg.FS}, "is not a control group of version 2"},
		"no file system": {connect.Config{Cgroup: r.cfg.Cgroup, FS: t.TempDir()}, "mount -t bpf bpf"},
	} {
		err := connect.Probe(c.cfg)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", name, err, c.want)
		}
	}
	if err := connect.Probe(r.cfg); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(r.cfg.FS, "fairlead*")); len(left) != 0 {
		t.Errorf("the probe left %q", left)
	}
}

func disconnect(fd int) error {
	raw := make([]byte, unix.SizeofSockaddrInet4) // AF_UNSPEC is 0
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&raw[0])), uintptr(len(raw)))
	if errno != 0 {
		return errno
	}
	return nil
}
