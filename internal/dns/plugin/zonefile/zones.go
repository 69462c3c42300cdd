package zonefile

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
	"github.com/fairlead/fairlead/internal/dns/plugin"
)

// Zones answers from the zones of files.
type Zones struct {
	next   plugin.Handler
	log    *slog.Logger
	name   string // of the plugin
	zones  []string
	reload time.Duration
	fall   corefile.Fall
	// files returns the file of each zone.
	files func() (map[string]string, error)
	have  atomic.Pointer[table]
}

// table is the zones as they were read. It is immutable.
type table struct {
	zones map[string]*zone
	files map[string]stamp // by zone
	names []string
}

// stamp describes a file.
type stamp struct {
	file     string
	modified time.Time
	size     int64
}

// NewFile reads the file of the plugin file, which must be there.
func NewFile(c *corefile.File, log *slog.Logger, next plugin.Handler) (*Zones, error) {
	files := map[string]string{}
	for _, z := range c.Zones {
		files[z] = c.Path
	}
	s := &Zones{
		next: next, log: log, name: "file", zones: c.Zones, reload: c.Reload, fall: c.Fall,
		files: func() (map[string]string, error) { return files, nil },
	}
	return s, s.read(true)
}

// NewAuto reads the directory of the plugin auto.
func NewAuto(c *corefile.Auto, log *slog.Logger, next plugin.Handler) (*Zones, error) {
	s := &Zones{
		next: next, log: log, name: "auto", zones: c.Zones, reload: c.Reload, fall: c.Fall,
		files: func() (map[string]string, error) { return scan(c) },
	}
	return s, s.read(true)
}

// scan returns the files of a directory, and those below it, whose name matches.
func scan(c *corefile.Auto) (map[string]string, error) {
	out := map[string]string{}
	if _, err := os.Stat(c.Directory); err != nil {
		return nil, fmt.Errorf("auto: %w", err)
	}
	err := filepath.WalkDir(c.Directory, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		groups := c.Pattern.FindStringSubmatch(d.Name())
		if groups == nil {
			return nil
		}
		origin := c.Origin
		for i, g := range groups {
			origin = strings.ReplaceAll(origin, "{"+strconv.Itoa(i)+"}", g)
		}
		origin = strings.ToLower(mdns.Fqdn(origin))
		if corefile.LongestZone(origin, c.Zones) != "" {
			out[origin] = path
		}
		return nil
	})
	return out, err
}

// read reads the files that have changed. A zone whose file cannot be read keeps its last
// contents; at the start, of the plugin file, it is an error.
func (s *Zones) read(start bool) error {
	files, err := s.files()
	if err != nil {
		return err
	}
	have := s.have.Load()
	next := &table{zones: map[string]*zone{}, files: map[string]stamp{}}
	changed := have == nil || len(have.files) != len(files)
	for origin, file := range files {
		st := stamp{file: file}
		if info, err := os.Stat(file); err == nil {
			st.modified, st.size = info.ModTime(), info.Size()
		}
		next.files[origin] = st
		if have != nil && have.zones[origin] != nil && have.files[origin] == st {
			next.zones[origin] = have.zones[origin]
			continue
		}
		z, err := read(file, origin)
		switch {
		case err == nil:
			next.zones[origin], changed = z, true
		case start && s.name == "file":
			return fmt.Errorf("file: %w", err)
		case have != nil && have.zones[origin] != nil:
			next.zones[origin] = have.zones[origin]
			if have.files[origin] != st {
				changed = true
				s.log.Warn("cannot read a zone file; keeping its last contents", "zone", origin, "err", err)
			}
		default:
			if have == nil || have.files[origin] != st {
				s.log.Warn("cannot read a zone file", "zone", origin, "err", err)
			}
			changed = true
		}
	}
	if changed {
		next.names = slices.Collect(maps.Keys(next.zones))
		s.have.Store(next)
	}
	return nil
}

// Run reads the files again when they change, until ctx ends.
func (s *Zones) Run(ctx context.Context) {
	if s.reload == 0 {
		return
	}
	tick := time.NewTicker(s.reload)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := s.read(false); err != nil {
				s.log.Warn("cannot read the zone files; keeping their last contents", "err", err)
			}
		}
	}
}

// Answer answers from the most specific zone.
func (s *Zones) Answer(ctx context.Context, q *plugin.Query) plugin.Reply {
	name := q.Name()
	t := s.have.Load()
	z := t.zones[corefile.LongestZone(name, t.names)]
	if z == nil || corefile.LongestZone(name, s.zones) == "" {
		return s.next.Answer(ctx, q)
	}
	if typ := q.Type(); typ == mdns.TypeAXFR || typ == mdns.TypeIXFR {
		return plugin.Fail(s.name, mdns.RcodeRefused, nil)
	}
	m, exists := z.answer(ctx, q)
	if !exists && len(m.Answer) == 0 && s.fall.Through(name) {
		return s.next.Answer(ctx, q)
	}
	return plugin.Reply{Msg: m, Plugin: s.name}
}
