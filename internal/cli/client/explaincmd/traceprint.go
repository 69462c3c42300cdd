package explaincmd

import (
	"fmt"
	"io"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/trace"
)

// maxShown bounds the lines of the packet's way that are shown; -o json has all of them.
const maxShown = 100

// printTrace shows the result and what decided, then the way.
func printTrace(out io.Writer, r *trace.Report) {
	line := plainLines(out)
	line("%s to %s: %s", r.From, r.To, r.Result)
	line("%s  [%s]", r.Decision.Text, r.Decision.Source)
	for _, l := range r.Why {
		line("%s  [%s]", l.Text, l.Source)
	}
	s := r.Seen
	text := fmt.Sprintf("%s %s to %s", s.Protocol, s.Source, s.Destination)
	if r.Service != "" {
		text += ", of Service " + r.Service
	}
	if s.Mode != "" {
		text += " (mode " + s.Mode + ")"
	}
	line("%s", text)
	printWay(line, s)
	if n := r.Next; n != nil {
		line("\nnext: node %s passed it on by %s to %s on node %s; the way from that node itself: %s", n.From, n.Device, n.Address,
			n.Node, n.Command)
	}
	if len(r.Elements) > 0 {
		fmt.Fprintln(out, "\nread back:")
		for _, l := range r.Elements[:min(len(r.Elements), maxShown)] {
			line("  %s  [%s]", l.Text, l.Source)
		}
	}
	for _, n := range r.Notes {
		line("\nnote: %s", n)
	}
}

// printWay shows where the packet was seen, where its addresses had changed, and the rules that it met. Policies and ends of chains
// that change nothing are left out.
func printWay(line func(string, ...any), s *trace.Seen) {
	var space, hook, ends string
	shown, left := 0, s.More
	for i := range s.Steps {
		st := &s.Steps[i]
		now := fmt.Sprintf("%s to %s", st.Source, st.Destination)
		switch {
		case st.Passed && st.Space == space && st.Hook == hook && now == ends,
			!st.Passed && st.Kind != "rule" && st.Verdict != trace.Drop:
			continue
		case shown == maxShown:
			left++
			continue
		}
		if st.Space != space {
			line("\n%s", st.Space)
			space, hook = st.Space, ""
		}
		shown++
		if !st.Passed {
			text := st.Text
			if text == "" {
				text = st.Kind
			}
			line("    %s: %s  [%s]", st.Verdict, text, st.Place())
			continue
		}
		hook, ends = st.Hook, now
		for _, d := range [][2]string{{", in ", st.In}, {", out ", st.Out}} {
			if d[1] != "" {
				now += d[0] + d[1]
			}
		}
		line("  %s: %s", hook, now)
	}
	if left > 0 {
		line("  %s more steps", left)
	}
}

// plainLines returns a function that prints a line. Its format has %s or %v for each argument, which may be a node's words.
func plainLines(out io.Writer) func(format string, args ...any) {
	return func(format string, args ...any) {
		for i := range args {
			args[i] = base.PlainLine(fmt.Sprint(args[i]))
		}
		fmt.Fprintf(out, format+"\n", args...)
	}
}
