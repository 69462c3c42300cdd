package chain

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"strconv"
	"sync/atomic"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/plugin"
)

// loop is the step that finds out once, at the start, whether the resolvers of its block send
// questions back: the server asks itself for a random name. A question that comes back would
// do so again and again.
type loop struct {
	name string // that is asked for
	at   endpoint
	next plugin.Handler
	seen atomic.Int32
	off  atomic.Bool
	// timeout of one try, pause after one that failed, and the time for all of them.
	timeout, pause, within time.Duration
}

// Limits of the look for loops, as in CoreDNS.
const (
	maxSeen     = 2
	loopTimeout = 2 * time.Second
	loopPause   = time.Second
	loopWithin  = 30 * time.Second
)

func newLoop(zone string, b *corefile.Block, next plugin.Handler) *loop {
	var id [16]byte
	rand.Read(id[:])
	name := hex.EncodeToString(id[:8]) + "." + hex.EncodeToString(id[8:]) + "." + zone
	if zone == "." {
		name = name[:len(name)-1]
	}
	l := &loop{name: name, next: next, timeout: loopTimeout, pause: loopPause, within: loopWithin}
	hosts, err := hostsOf(b)
	if err == nil {
		l.at = endpoint{hosts[0], b.Zones[0].Port, b.Zones[0].Transport}
	}
	return l
}

// Answer counts the questions for the random name, and ends the ones that come back.
func (l *loop) Answer(ctx context.Context, q *plugin.Query) plugin.Reply {
	if q.Type() != mdns.TypeHINFO || l.off.Load() || q.Name() != l.name {
		return l.next.Answer(ctx, q)
	}
	if l.seen.Add(1) > maxSeen {
		return plugin.Fail("loop", mdns.RcodeServerFailure, nil)
	}
	return l.next.Answer(ctx, q)
}

// find asks for the random name. Its error is a loop.
func (l *loop) find(ctx context.Context) error {
	if l.at.transport != corefile.DNS {
		return nil
	}
	defer l.off.Store(true)
	host := l.at.host
	if host == "" {
		host = "127.0.0.1"
	}
	addr := net.JoinHostPort(host, strconv.Itoa(int(l.at.port)))
	m := new(mdns.Msg).SetQuestion(l.name, mdns.TypeHINFO)
	c := &mdns.Client{Timeout: l.timeout}
	for end := time.Now().Add(l.within); time.Now().Before(end); {
		// Resolvers that are silent send nothing back, however often they are asked.
		l.seen.Store(0)
		_, _, err := c.ExchangeContext(ctx, m, addr)
		if l.seen.Load() > maxSeen {
			return fmt.Errorf("the resolvers of forward send questions back to this server at %s, in a loop; "+
				"name other resolvers than this server's own (https://coredns.io/plugins/loop#troubleshooting)", addr)
		}
		if err == nil || ctx.Err() != nil {
			return nil
		}
		select {
		case <-ctx.Done():
		case <-time.After(l.pause):
		}
	}
	return nil
}
