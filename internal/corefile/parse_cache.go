package corefile

import (
	"strings"
	"time"
)

// Cache keeps answers.
type Cache struct {
	Zones           []string
	Success, Denial CacheLimits
	ServFail        time.Duration // how long a failure is kept; 0 for never
	// PrefetchHits is how often an answer must be asked for within PrefetchWithin to be
	// fetched again when PrefetchPercent of its TTL remain; 0 for never.
	PrefetchHits    int
	PrefetchWithin  time.Duration
	PrefetchPercent int
	// StaleFor is how long an expired answer is used; 0 for never. With StaleVerify the
	// plugins behind are asked first, for StaleWait at most; 0 for as long as they take.
	StaleFor, StaleWait time.Duration
	StaleVerify         bool
	StaleTTL            uint32 // of a stale answer
	KeepTTL             bool
}

// CacheLimits are the bounds for answers of one kind.
type CacheLimits struct {
	Capacity int
	// MinTTL and MaxTTL bound the time that an answer is kept.
	MinTTL, MaxTTL time.Duration
	// Except are zones whose answers are not kept.
	Except []string
}

// PluginName is the name of the directive.
func (*Cache) PluginName() string { return "cache" }

// Defaults of CoreDNS's cache.
const (
	defaultCapacity  = 10000
	maxCacheCapacity = 10_000_000
	minCacheTTL      = 5 * time.Second
	maxCacheTTL      = time.Hour
	maxDenialTTL     = maxCacheTTL / 2
	defaultServFail  = 5 * time.Second
	maxServFail      = 5 * time.Minute
	maxSeconds       = 1 << 31
)

func parseCache(b *Block, l line) (Plugin, error) {
	c := &Cache{
		Success:  CacheLimits{Capacity: defaultCapacity, MinTTL: minCacheTTL, MaxTTL: maxCacheTTL},
		Denial:   CacheLimits{Capacity: defaultCapacity, MinTTL: minCacheTTL, MaxTTL: maxDenialTTL},
		ServFail: defaultServFail, PrefetchWithin: time.Minute, PrefetchPercent: 10,
	}
	args := l.args
	if len(args) > 0 && isNumber(args[0]) {
		n, err := l.integer(0, 1, maxSeconds)
		if err != nil {
			return nil, err
		}
		c.Success.MaxTTL, c.Denial.MaxTTL = time.Duration(n)*time.Second, time.Duration(n)*time.Second
		args = args[1:]
	}
	var err error
	if c.Zones, err = b.zonesOr(l, args); err != nil {
		return nil, err
	}
	return c, l.properties(map[string]func(line) error{
		"success":     c.Success.read,
		"denial":      c.Denial.read,
		"prefetch":    c.prefetch,
		"serve_stale": c.serveStale,
		"keepttl":     set(&c.KeepTTL),
		"disable": func(p line) error {
			if err := p.want(1, -1, "success or denial, and zones"); err != nil {
				return err
			}
			zones := []string{"."}
			if len(p.args) > 1 {
				if zones, err = b.zonesOr(p, p.args[1:]); err != nil {
					return err
				}
			}
			switch p.args[0] {
			case "success":
				c.Success.Except = zones
			case "denial":
				c.Denial.Except = zones
			default:
				return p.pos.errorf("disable: %q is not one of success, denial", p.args[0])
			}
			return nil
		},
		"servfail": func(p line) (err error) {
			if c.ServFail, err = p.oneDuration(); err == nil && c.ServFail > maxServFail {
				err = p.pos.errorf("servfail: %s; want at most %s (RFC 2308, 7.1)", c.ServFail, maxServFail)
			}
			return err
		},
	})
}

func isNumber(s string) bool {
	for _, c := range s {
		if c < '0' || c > '9' {
			return c == '-' && len(s) > 1
		}
	}
	return s != ""
}

// read reads "CAPACITY [TTL] [MINTTL]".
func (c *CacheLimits) read(p line) (err error) {
	if err := p.want(1, 3, "CAPACITY [TTL] [MINTTL]"); err != nil {
		return err
	}
	if c.Capacity, err = p.integer(0, 1, maxCacheCapacity); err != nil {
		return err
	}
	for i, to := range []*time.Duration{&c.MaxTTL, &c.MinTTL} {
		if i+1 >= len(p.args) {
			break
		}
		n, err := p.integer(i+1, 1-i, maxSeconds)
		if err != nil {
			return err
		}
		*to = time.Duration(n) * time.Second
	}
	return nil
}

// prefetch reads "AMOUNT [DURATION] [PERCENTAGE%]".
func (c *Cache) prefetch(p line) (err error) {
	if err := p.want(1, 3, "AMOUNT [DURATION] [PERCENTAGE%]"); err != nil {
		return err
	}
	if c.PrefetchHits, err = p.integer(0, 0, 1<<30); err != nil {
		return err
	}
	if len(p.args) > 1 {
		if c.PrefetchWithin, err = p.duration(1); err != nil {
			return err
		}
	}
	if len(p.args) < 3 {
		return nil
	}
	number, ok := strings.CutSuffix(p.args[2], "%")
	if !ok {
		return p.pos.errorf("prefetch: %q does not end with %%", p.args[2])
	}
	p.args[2] = number
	c.PrefetchPercent, err = p.integer(2, 10, 90)
	return err
}

// serveStale reads "[DURATION] [immediate [TTL] | verify [WAIT [TTL]]]".
func (c *Cache) serveStale(p line) (err error) {
	if err := p.want(0, 4, "[DURATION] [immediate [TTL] | verify [WAIT [TTL]]]"); err != nil {
		return err
	}
	c.StaleFor = time.Hour
	if len(p.args) > 0 {
		if c.StaleFor, err = p.duration(0); err != nil {
			return err
		}
	}
	rest := 2
	if len(p.args) > 1 {
		switch p.args[1] {
		case "immediate":
		case "verify":
			c.StaleVerify = true
			if rest++; len(p.args) > 2 {
				if c.StaleWait, err = p.duration(2); err != nil {
					return err
				}
			}
		default:
			return p.pos.errorf("serve_stale: %q is not one of immediate, verify", p.args[1])
		}
	}
	if len(p.args) > rest {
		ttl, err := p.duration(rest)
		if err != nil {
			return err
		}
		c.StaleTTL = uint32(ttl / time.Second)
		rest++
	}
	if len(p.args) > rest {
		return p.pos.errorf("serve_stale: the recheck interval %q is not supported; remove it", p.args[rest])
	}
	return nil
}
