package connect

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/testbed"
)

// Where sockets cannot be listed, or not be ended, connected sockets of UDP stay as they are, for the packet filter, and the reason is
// known. All other sockets are translated as before.
func TestSocketsCannotBeEnded(t *testing.T) {
	for name, c := range map[string]struct {
		mask func() error
		want string // part of the reason
	}{
		"all is there":        {func() error { return nil }, ""},
		"no sock_diag":        {testbed.WithoutSockDiag, "cannot list sockets of UDP (CONFIG_INET_UDP_DIAG): protocol not supported"},
		"without the right":   {testbed.WithoutNetAdmin, "cannot end sockets of UDP (CAP_NET_ADMIN): operation not permitted"},
		"neither of the ways": {func() error { return errors.Join(testbed.WithoutNetAdmin(), testbed.WithoutSockDiag()) }, "cannot list"},
	} {
		t.Run(name, func(t *testing.T) {
			server := listenLocal(t)
			at := server.LocalAddr().(*net.UDPAddr).AddrPort()
			var p *Programs
			cfg := Config{Cgroup: testbed.Group(t).Dir, FS: testbed.BPFFS(t)}
			err := netns.Do(ownNamespace, func() (err error) {
				if err = c.mask(); err == nil {
					p, err = Open(cfg)
				}
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = p.Close() })
			if why := p.Unable(); (why == nil) != (c.want == "") || why != nil && !strings.Contains(why.Error(), c.want) {
				t.Errorf("sockets cannot be ended since %v, want %q", why, c.want)
			}
			if err := errors.Join(serveUDP(p, at), p.Attach()); err != nil {
				t.Fatal(err)
			}
			connected, err := net.Dial("udp4", front.String())
			switch {
			case c.want != "" && !errors.Is(err, unix.ENETUNREACH): // there is no packet filter here, and no route to the Service
				t.Errorf("a connected socket: %v, want an untranslated address", err)
			case c.want == "" && err != nil:
				t.Errorf("a connected socket: %v", err)
			case err == nil:
				_ = connected.Close()
			}
			free, err := net.ListenUDP("udp4", nil)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = free.Close() }()
			if _, err := free.WriteToUDPAddrPort([]byte("x"), front); err != nil {
				t.Errorf("a socket that is not connected: %v", err)
			}
			if err := server.SetReadDeadline(time.Now().Add(testbed.Patience)); err != nil {
				t.Fatal(err)
			}
			if _, _, err := server.ReadFromUDPAddrPort(make([]byte, 8)); err != nil {
				t.Error(err)
			}
		})
	}
}

// serveUDP has the Service at front, with one endpoint.
func serveUDP(p *Programs, at netip.AddrPort) error {
	return errors.Join(p.PutSlots(1, []netip.AddrPort{at}),
		p.PutFront(Front{Addr: front, Protocol: unix.IPPROTO_UDP}, Route{List: [2]uint32{1}, Count: [2]uint32{1}}))
}
