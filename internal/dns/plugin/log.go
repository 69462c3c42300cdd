package plugin

import (
	"context"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	mdns "github.com/miekg/dns"

	"github.com/fairlead/fairlead/internal/corefile"
)

// Errors logs why questions fail.
type Errors struct {
	c    *corefile.Errors
	log  *slog.Logger
	next Handler

	mu     sync.Mutex
	counts []int
	since  []time.Time
}

// NewErrors returns the step.
func NewErrors(c *corefile.Errors, log *slog.Logger, next Handler) *Errors {
	n := len(c.Consolidated)
	return &Errors{c: c, log: log, next: next, counts: make([]int, n), since: make([]time.Time, n)}
}

// Answer logs the error of the reply.
func (e *Errors) Answer(ctx context.Context, q *Query) Reply {
	r := e.next.Answer(ctx, q)
	if r.Err == nil {
		return r
	}
	text := r.Err.Error()
	level := slog.LevelError
	for i, c := range e.c.Consolidated {
		if c.Pattern.MatchString(text) {
			if !e.count(i, time.Now()) {
				return r
			}
			level = levels[c.Level]
			break
		}
	}
	e.log.Log(ctx, level, "cannot answer a question", "name", q.Name(), "type", mdns.Type(q.Type()).String(),
		"rcode", mdns.RcodeToString[r.Code()], "err", text)
	return r
}

var levels = map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warning": slog.LevelWarn, "error": slog.LevelError}

// count counts an error of a consolidated kind, and reports whether it is logged by itself.
func (e *Errors) count(i int, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.counts[i]++
	if e.counts[i] == 1 {
		e.since[i] = now
		return e.c.Consolidated[i].ShowFirst
	}
	return false
}

// Run logs the numbers of consolidated errors, until ctx ends.
func (e *Errors) Run(ctx context.Context) {
	if len(e.c.Consolidated) == 0 {
		return
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			e.flush(time.Time{})
			return
		case now := <-tick.C:
			e.flush(now)
		}
	}
}

// flush logs the numbers whose period has passed; all with the zero time.
func (e *Errors) flush(now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for i, c := range e.c.Consolidated {
		n := e.counts[i]
		if n == 0 || !now.IsZero() && now.Sub(e.since[i]) < c.Period {
			continue
		}
		e.counts[i] = 0
		e.log.Log(context.Background(), levels[c.Level], "errors of one kind", "number", n, "pattern", c.Pattern.String(), "within", c.Period)
	}
}

// Log writes a line for each question.
func Log(rules []*corefile.Log, log *slog.Logger, next Handler) Handler {
	return Func(func(ctx context.Context, q *Query) Reply {
		rule := logRule(rules, q.Name())
		if rule == nil {
			return next.Answer(ctx, q)
		}
		start := time.Now()
		asked := q.Msg.Copy()
		r := next.Answer(ctx, q)
		if logged(rule.Classes, r) {
			log.Info(logLine(rule.Format, q.With(asked), r, time.Since(start)))
		}
		return r
	})
}

func logRule(rules []*corefile.Log, name string) *corefile.Log {
	for _, r := range rules {
		if corefile.LongestZone(name, r.Scopes) != "" {
			return r
		}
	}
	return nil
}

// logged reports whether a reply is of one of the classes.
func logged(classes []string, r Reply) bool {
	if slices.Contains(classes, "all") {
		return true
	}
	class := "error"
	if r.Msg != nil {
		switch KindOf(r.Msg) {
		case Positive, Delegation:
			class = "success"
		case NoName, NoData:
			class = "denial"
		}
	}
	return slices.Contains(classes, class)
}

// logLine fills a format of CoreDNS's plugin log. A field without a value is "-".
func logLine(format string, q *Query, r Reply, took time.Duration) string {
	size, do, bufsize := q.Size, q.DO(), 512
	if o := q.Msg.IsEdns0(); o != nil {
		bufsize = int(o.UDPSize())
	}
	if q.Network == "tcp" {
		bufsize = mdns.MaxMsgSize
	}
	rsize, flags := "-", "-"
	if r.Msg != nil {
		rsize, flags = strconv.Itoa(r.Msg.Len()), flagNames(&r.Msg.MsgHdr)
	}
	remote := q.Client.Addr().Unmap().String()
	if q.Client.Addr().Unmap().Is6() {
		remote = "[" + remote + "]"
	}
	return strings.NewReplacer(
		"{remote}", remote, "{port}", strconv.Itoa(int(q.Client.Port())), "{local}", q.Server,
		"{>id}", strconv.Itoa(int(q.Msg.Id)), "{type}", mdns.Type(q.Type()).String(), "{class}", mdns.Class(q.Question().Qclass).String(),
		"{name}", q.Name(), "{proto}", q.Network, "{size}", strconv.Itoa(size), "{>do}", strconv.FormatBool(do),
		"{>bufsize}", strconv.Itoa(bufsize), "{rcode}", mdns.RcodeToString[r.Code()], "{>rflags}", flags, "{rsize}", rsize,
		"{duration}", strconv.FormatFloat(took.Seconds(), 'f', -1, 64)+"s", "{>opcode}", strconv.Itoa(q.Msg.Opcode),
	).Replace(format)
}

// flagNames returns the flags of an answer, such as "qr,aa,rd".
func flagNames(h *mdns.MsgHdr) string {
	var out []string
	for _, f := range []struct {
		set  bool
		name string
	}{
		{h.Response, "qr"}, {h.Authoritative, "aa"}, {h.Truncated, "tc"}, {h.RecursionDesired, "rd"}, {h.RecursionAvailable, "ra"},
		{h.Zero, "z"}, {h.AuthenticatedData, "ad"}, {h.CheckingDisabled, "cd"},
	} {
		if f.set {
			out = append(out, f.name)
		}
	}
	return strings.Join(out, ",")
}
