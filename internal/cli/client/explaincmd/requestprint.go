package explaincmd

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"text/tabwriter"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/trace/request"
)

// ends are the ends of the connection of a request, also of one on which TLS has failed.
type ends struct {
	mu       sync.Mutex // a dial may end late, when the request has failed
	from, at netip.AddrPort
}

func (e *ends) note(c net.Conn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.from, _ = netip.ParseAddrPort(c.LocalAddr().String())
	e.at, _ = netip.ParseAddrPort(c.RemoteAddr().String())
}

func (e *ends) get() (from, at netip.AddrPort) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.from, e.at
}

// printRequest shows what the client got, then what each load balancer has seen.
func printRequest(out io.Writer, r *RequestReport) error {
	line := plainLines(out)
	result := r.Error
	if r.Status != 0 {
		result = fmt.Sprintf("%d %s", r.Status, http.StatusText(r.Status))
		if r.Error != "" {
			result += ", and " + r.Error
		}
	}
	line("%s %s: %s", r.Method, r.URL, result)
	if r.At.IsValid() {
		how := []string{fmt.Sprintf("from %s to %s", r.From, r.At)}
		for _, s := range []string{r.Protocol, r.TLS} {
			if s != "" {
				how = append(how, s)
			}
		}
		if r.Certificate != "" {
			how = append(how, "certificate of "+r.Certificate)
		}
		line("%s, after %s", strings.Join(how, ", "), duration(r.Seconds))
	}
	if r.Location != "" {
		line("redirect to %s", r.Location)
	}
	w := tabwriter.NewWriter(out, 0, 4, 3, ' ', 0)
	for i := range r.Seen {
		printSeen(w, line, &r.Seen[i])
		if err := w.Flush(); err != nil {
			return err
		}
	}
	switch {
	case len(r.Seen) > 0:
	case !r.At.IsValid():
		line("\nno connection was made: 'fairlead explain ADDRESS:PORT' says why an address of a Service does not answer")
	case r.Asked == 0:
		line("\nno load balancer could be asked")
	case r.NotAsked > 0 || len(r.Problems) > 0:
		line("\nnone of the %v load balancers that were asked has seen it", r.Asked)
	default:
		line("\nnone of %v load balancers has seen it: %s is not an address of one that speaks HTTP, another program is before it, or it was "+
			"refused before it was read", r.Asked, r.At)
	}
	if r.NotAsked > 0 {
		line("\n! %v more nodes were not asked", r.NotAsked)
	}
	for _, p := range r.Problems {
		line("! %s", p)
	}
	return nil
}

// printSeen shows what one load balancer has seen of a request.
func printSeen(w io.Writer, line func(string, ...any), s *RequestSeen) {
	source := "node " + s.Node
	line("\nnode %s", s.Node)
	line("  Service %s took it at %s from %s  [%s]", s.Front, s.Listener, s.Client, source)
	if t := s.Route; t != nil {
		line("  by rule %v of %s %s/%s  [%s %s/%s spec.rules[%v]]", t.Rule+1, t.Kind, t.Namespace, t.Name, t.Kind, t.Namespace, t.Name, t.Rule)
	}
	if s.Backend != "" {
		line("  led to Service %s  [%s]", s.Backend, source)
	}
	if s.Why != "" {
		line("  answered itself with %v: %s  [%s]", s.Status, s.Why, source)
	}
	if s.Pod.IsValid() {
		line("  %s answered %v  [answer to node %s]", s.podText(s.Pod), s.PodStatus, s.Node)
	}
	if s.Status == request.StatusLeft {
		line("  the client left before an answer  [%s]", source)
	}
	times := []string{}
	if s.Sent > 0 {
		times = append(times, "a Pod had it after "+duration(s.Sent))
	}
	if s.Answered > 0 {
		times = append(times, "its answer began after "+duration(s.Answered))
	}
	line("  %s  [%s]", strings.Join(append(times, "all was over after "+duration(s.Took)), ", "), source)
	if len(s.Attempts) == 1 && s.Attempts[0].Error == "" && s.Why == "" {
		return
	}
	if len(s.Attempts) > 0 {
		fmt.Fprintln(w, "\n  AFTER\tPOD\tRESULT")
	}
	for i := range s.Attempts {
		a := &s.Attempts[i]
		fmt.Fprintf(w, "  %s\t%s\t%s\n", duration(a.After), base.PlainLine(s.podText(a.Pod)), base.PlainLine(resultOf(a)))
	}
	if s.More > 0 {
		fmt.Fprintf(w, "  %d earlier attempts\t\t\n", s.More)
	}
}

func (s *RequestSeen) podText(at netip.AddrPort) string {
	if name := s.Pods[at.Addr().String()]; name != "" {
		return fmt.Sprintf("Pod %s (%s)", name, at)
	}
	return at.String()
}

func resultOf(a *request.Attempt) string {
	switch {
	case a.Error != "" && a.Status != 0:
		return fmt.Sprintf("%d, %s", a.Status, a.Error)
	case a.Error != "":
		return a.Error
	case a.Status != 0:
		return fmt.Sprint(a.Status)
	}
	return "not waited for"
}

func duration(seconds float64) string { return fmt.Sprintf("%.1f ms", seconds*1000) }
