// Package follow sends one packet from a network namespace and sees what becomes of it, there and in the namespaces on its way.
package follow

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/fairlead/fairlead/internal/kernel/netns"
	"github.com/fairlead/fairlead/internal/kernel/nftables"
	"github.com/fairlead/fairlead/internal/kernel/nftrace"
	"github.com/fairlead/fairlead/internal/kernel/probe"
	"github.com/fairlead/fairlead/internal/preflight"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/trace"
)

// Space is a network namespace on the way.
type Space struct {
	// Name is such as "Pod default/web" or "node n1".
	Name string
	// Path is the file of the namespace, empty for the process's own.
	Path string
}

// Packet is what to send. Spaces has the sender's first. The source is the one that the routes say.
type Packet struct {
	Spaces   []Space
	Protocol svc.Protocol
	To       netip.AddrPort
}

// Check returns an error if the destination is not one receiver, or the protocol not TCP or UDP.
func (p *Packet) Check() error {
	switch a := p.To.Addr(); {
	case !p.To.IsValid() || p.To.Port() == 0:
		return errors.New("the address is not IP:PORT")
	case a.IsMulticast() || a.IsUnspecified() || a.Zone() != "" || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return fmt.Errorf("%s is not the address of one receiver", a)
	case p.Protocol != svc.TCP && p.Protocol != svc.UDP:
		return fmt.Errorf("the protocol is %s; want TCP or UDP", p.Protocol)
	}
	return nil
}

const (
	// wait is how long an answer may take, rejection how long one may take after a rule has dropped the packet: with reject it has
	// sent the answer before.
	wait      = 3 * time.Second
	rejection = 300 * time.Millisecond
	// step is the time between looks at the trace.
	step = 20 * time.Millisecond
	// describing is how long rules are read after that, to show them in words: one may have a set of thousands of addresses.
	describing = time.Second
)

// in runs f in the namespace of a Space.
func (s *Space) in(f func() error) error {
	if s.Path == "" {
		return f()
	}
	return netns.Do(s.Path, f)
}

// Send sends the packet and waits until something comes back, or for 3 seconds. Its error is nftrace.ErrBusy while another trace is
// under way.
func Send(ctx context.Context, p *Packet) (*trace.Seen, error) {
	if err := p.Check(); err != nil {
		return nil, err
	}
	out := &trace.Seen{Protocol: p.Protocol.String(), Destination: p.To, Answer: trace.NoAnswer}
	var packet *probe.Probe
	err := p.Spaces[0].in(func() (err error) {
		packet, err = probe.Open(p.Protocol, p.To)
		return err
	})
	if errors.Is(err, probe.ErrNoRoute) {
		out.Answer, out.Error = trace.NoRoute, err.Error()
		return out, nil
	}
	if err != nil {
		return nil, err
	}
	defer packet.Close()
	out.Source = packet.Source()
	w := &watched{spaces: p.Spaces, traces: make([]*nftrace.Trace, len(p.Spaces))}
	if err := w.start(packet, p); err != nil {
		return nil, errors.Join(err, w.close())
	}
	err = w.send(ctx, packet, out)
	w.tell(out, time.Now().Add(describing))
	return out, errors.Join(err, w.close())
}

// watched are the traces of all namespaces, nil where the kernel has none.
type watched struct {
	spaces []Space
	traces []*nftrace.Trace
	why    string // the first reason for that
	order  []seen
}

// seen is one report, of the trace of a namespace.
type seen struct {
	space int
	step  *nftrace.Step
}

func (w *watched) start(sent *probe.Probe, p *Packet) error {
	packet := nftrace.Packet{Protocol: p.Protocol, Source: sent.Source(), Destination: p.To, Sequence: sent.Sequence()}
	for i := range w.spaces {
		err := w.spaces[i].in(func() (err error) {
			w.traces[i], err = nftrace.Start(packet)
			return err
		})
		switch {
		case err == nil:
		case nftables.IsUnsupported(err):
			w.why = "the kernel cannot trace: " + err.Error()
		default:
			return fmt.Errorf("trace in the network namespace of %s: %w", w.spaces[i].Name, err)
		}
	}
	return nil
}

// send sends the packet, and waits for its answer.
func (w *watched) send(ctx context.Context, packet *probe.Probe, out *trace.Seen) error {
	answer, err := packet.Send()
	end := time.Now().Add(wait)
	if answer == probe.Dropped { // perhaps by a rule that has sent a rejection
		answer, end = probe.None, time.Now().Add(rejection)
	}
	for answer == probe.None && err == nil && ctx.Err() == nil && time.Now().Before(end) {
		answer, err = packet.Await(step)
		w.read()
		if w.dropped() {
			if limit := time.Now().Add(rejection); limit.Before(end) {
				end = limit
			}
		}
	}
	w.read()
	switch answer {
	case probe.Accepted:
		out.Answer = trace.Accepted
	case probe.Reset:
		out.Answer = trace.Reset
	case probe.Rejected:
		out.Answer, out.Error = trace.Rejected, err.Error()
		err = nil
	}
	return errors.Join(err, ctx.Err())
}

// read takes what the traces have by now.
func (w *watched) read() {
	for i, t := range w.traces {
		if t == nil {
			continue
		}
		before, _ := t.Steps()
		if err := t.Read(); err != nil && w.why == "" {
			w.why = err.Error()
		}
		after, _ := t.Steps()
		for k := len(before); k < len(after); k++ {
			w.order = append(w.order, seen{i, &after[k]})
		}
	}
}

func (w *watched) dropped() bool {
	for _, t := range w.traces {
		if t != nil && t.Dropped() {
			return true
		}
	}
	return false
}

// tell writes down what was seen, with the hook that each report was in: that of the chain of the trace before it. It reads no more
// rules after end.
func (w *watched) tell(out *trace.Seen, end time.Time) {
	out.Untraced = w.why
	hooks := make([]string, len(w.spaces))
	for _, s := range w.order {
		t := w.traces[s.space]
		if s.step.Hook != "" {
			hooks[s.space] = s.step.Hook
		}
		st := trace.Step{Space: w.spaces[s.space].Name, Hook: hooks[s.space], In: s.step.In, Out: s.step.Out, Source: s.step.Source,
			Destination: s.step.Destination}
		switch {
		case s.step.Hook != "": // the first report of a chain has the packet's headers
			if st.Passed = s.step.Source.IsValid(); st.Passed {
				out.Steps = append(out.Steps, st)
			}
			continue
		case s.step.Kind == nftrace.Rule && s.step.Handle == 0: // the end of a chain, which Linux reports as a rule since 5.17
			continue
		}
		st.Table, st.Chain, st.Handle = s.step.Table.String(), s.step.Chain, s.step.Handle
		st.Kind, st.Verdict = string(s.step.Kind), s.step.Verdict
		if s.step.Target != "" {
			st.Verdict += " " + s.step.Target
		}
		st.Ours = preflight.Ours(nftables.BaseChain{Table: s.step.Table, Name: s.step.Chain})
		switch {
		case s.step.Kind != nftrace.Rule:
		case time.Now().Before(end):
			st.Text = t.Describe(s.step)
		default:
			out.Undescribed++
		}
		out.Steps = append(out.Steps, st)
	}
	for _, t := range w.traces {
		if t != nil {
			_, more := t.Steps()
			out.More += more
		}
	}
}

// close removes the traces.
func (w *watched) close() error {
	var errs []error
	for _, t := range w.traces {
		if t != nil {
			errs = append(errs, t.End())
		}
	}
	return errors.Join(errs...)
}
