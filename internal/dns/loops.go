package dns

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/fairlead/fairlead/internal/dns/resolvconf"
	"github.com/fairlead/fairlead/internal/zone"
)

// An upstream that forwards questions back to this server would make them loop.
// So each upstream is asked at the start for a random name; if that question
// arrives here, the upstream is not used.

// loopSuffix ends the random names. "invalid" never exists (RFC 6761).
const loopSuffix = ".loop.fairlead.invalid"

// findLoops asks each upstream.
func (s *Server) findLoops(ctx context.Context) {
	for _, u := range s.forward.all() {
		var id [16]byte
		rand.Read(id[:])
		text := hex.EncodeToString(id[:]) + loopSuffix
		var n zone.Name
		if n.ParseText(text) != nil {
			continue // unreachable
		}
		name := string(n.Wire())
		s.loopProbes.Store(name, u)
		_, _ = u.exchange(ctx, ask{name: []byte(name), typ: typeTXT}, false, s.options.Timeout)
		s.loopProbes.Delete(name)
		if ctx.Err() != nil {
			return
		}
	}
}

// isLoopProbe reports whether a name is one that findLoops asks for, and if so
// marks the upstream as looped.
func (s *Server) isLoopProbe(n *zone.Name) bool {
	v, ok := s.loopProbes.Load(string(n.Wire()))
	if !ok {
		return false
	}
	u := v.(*upstream)
	if !u.looped.Swap(true) {
		s.log.Error("upstream forwards questions back to this server and is not used; give another one with --upstream",
			"upstream", u.name)
	}
	return true
}

// readResolvConf reads the name servers of a file in the form of
// resolv.conf(5), or of its original where --configure-resolver has replaced it by one
// that names this server.
func readResolvConf(file string) ([]netip.AddrPort, error) {
	raw, err := os.ReadFile(resolvconf.Original(file))
	if err != nil {
		return nil, fmt.Errorf("dns: upstream resolvers: %w", err)
	}
	var out []netip.AddrPort
	for line := range strings.Lines(string(raw)) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != "nameserver" {
			continue
		}
		// Others than addresses are skipped, as resolvers do.
		if a, err := netip.ParseAddr(f[1]); err == nil {
			out = append(out, netip.AddrPortFrom(a.Unmap(), 53))
		}
	}
	return out, nil
}

// filePeriod is how often resolv.conf and the hosts file are checked for changes.
const filePeriod = 5 * time.Second

// watchResolvConf follows changes of resolv.conf, as DHCP makes them, until ctx
// ends.
func (s *Server) watchResolvConf(ctx context.Context) {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		if s.reloadResolvConf() {
			s.findLoops(ctx)
		}
	}, filePeriod)
}

// reloadResolvConf uses the name servers in the file and reports whether they have
// changed. A file without any is ignored: it may be about to be written.
func (s *Server) reloadResolvConf() bool {
	now, err := readResolvConf(s.options.ResolvConf)
	if err != nil || len(now) == 0 {
		return false
	}
	var have []netip.AddrPort
	for _, u := range *s.forward.main.Load() { // none of them over TLS
		have = append(have, u.addr)
	}
	if slices.Equal(now, have) {
		return false
	}
	s.forward.setMain(now)
	s.log.Info("upstream resolvers changed", "file", s.options.ResolvConf, "upstreams", now)
	return true
}
