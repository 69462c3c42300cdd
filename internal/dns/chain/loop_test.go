package chain

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/plugin"
)

// Resolvers that are only silent are no loop, however often the server asks itself.
func TestSilentResolversAreNoLoop(t *testing.T) {
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var next plugin.Func = func(context.Context, *plugin.Query) plugin.Reply { return plugin.Reply{Drop: true} }
	l := newLoop(".", &corefile.Block{Zones: []corefile.Zone{{Name: ".", Transport: corefile.DNS}}}, next)
	l.at = endpoint{"127.0.0.1", uint16(server.LocalAddr().(*net.UDPAddr).Port), corefile.DNS}
	l.timeout, l.pause, l.within = 30*time.Millisecond, time.Millisecond, 300*time.Millisecond
	var asked atomic.Int32
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		buf := make([]byte, mdns.MinMsgSize)
		for {
			n, _, err := server.ReadFrom(buf)
			if err != nil {
				return
			}
			m := new(mdns.Msg)
			if err := m.Unpack(buf[:n]); err != nil {
				t.Error(err)
				continue
			}
			asked.Add(1)
			l.Answer(t.Context(), &plugin.Query{Msg: m})
		}
	}()
	err = l.find(t.Context())
	server.Close()
	<-ended
	if err != nil || asked.Load() <= maxSeen {
		t.Errorf("asked %d times: %v", asked.Load(), err)
	}
}
