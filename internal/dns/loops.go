package dns

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
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

// loopFinder finds upstreams that forward questions back to this server.
type loopFinder struct {
	forward *forwarder
	timeout time.Duration // of one question
	log     *slog.Logger
	probes  sync.Map // wire name → *upstream
}

// find asks each upstream.
func (s *loopFinder) find(ctx context.Context) {
	for _, u := range s.forward.all() {
		var id [16]byte
		rand.Read(id[:])
		text := hex.EncodeToString(id[:]) + loopSuffix
		var n zone.Name
		if n.ParseText(text) != nil {
			continue // unreachable
		}
		name := string(n.Wire())
		s.probes.Store(name, u)
		_, _ = u.exchange(ctx, ask{name: []byte(name), typ: typeTXT}, false, s.timeout)
		s.probes.Delete(name)
		if ctx.Err() != nil {
			return
		}
	}
}

// isProbe reports whether find asks for a name, and if so marks the upstream as looped.
func (s *loopFinder) isProbe(n *zone.Name) bool {
	v, ok := s.probes.Load(string(n.Wire()))
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
func (s *loopFinder) watchResolvConf(ctx context.Context, file string) {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		if s.forward.reload(file) {
			s.find(ctx)
		}
	}, filePeriod)
}

// reload uses the name servers in file and reports whether they have
// changed. It ignores a file without any: another program may be writing it.
func (f *forwarder) reload(file string) bool {
	now, err := readResolvConf(file)
	if err != nil || len(now) == 0 {
		return false
	}
	var have []netip.AddrPort
	for _, u := range *f.main.Load() { // none of them over TLS
		have = append(have, u.addr)
	}
	if slices.Equal(now, have) {
		return false
	}
	f.setMain(now)
	f.log.Info("upstream resolvers changed", "file", file, "upstreams", now)
	return true
}
