package connecttime

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/dataplane"
	"github.com/fairlead/fairlead/internal/dataplane/nft"
	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/flows"
)

// On a kernel without sock_diag the rules translate connected sockets of UDP, the programs all others, and the log has the reason.
func TestWithoutSockDiag(t *testing.T) {
	r := newRig(t)
	var log bytes.Buffer
	e := flows.NewEnv(t, func(t testing.TB, h *testbed.Host) (m dataplane.Applier) {
		err := netns.Do(h.NSPath(), func() (err error) {
			if err = testbed.WithoutSockDiag(); err == nil {
				m, err = New(nft.Config{DropInvalid: true}, r.cfg, slog.New(slog.NewTextHandler(&log, nil)))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return m
	})
	const want = "connect-time leaves connected sockets of UDP to the packet filter"
	if text := log.String(); !strings.Contains(text, want) || !strings.Contains(text, "CONFIG_INET_UDP_DIAG") {
		t.Errorf("logged %q, want %q with the option of the kernel", text, want)
	}
	e.Apply(t, web(e, "a"), nil)
	if _, tracked := asked(t, e, svc.UDP, "node", web4); !tracked {
		t.Error("a connected socket of UDP: not translated by the rules")
	}
	if _, tracked := asked(t, e, svc.TCP, "node", web4); tracked {
		t.Error("a connection of TCP: translated by the rules")
	}
	c := open(t, e.Node, "udp4")
	e.Forget(t)
	if name, from := exchange(t, c, web4); name != "a" || from != web4 || e.Node.Tracks(svc.UDP, web4) == nil {
		t.Errorf("a socket that is not connected: answered by %s as %s, or translated by the rules", name, from)
	}
}
