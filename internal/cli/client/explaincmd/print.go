package explaincmd

import (
	"cmp"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/explain"
)

// print shows the worst verdict in full, and a line for each of the others.
func (r *Report) print(out io.Writer) error {
	if r.At != nil {
		fmt.Fprintf(out, "at %s, %s\n", r.At.Local().Format(time.RFC3339), unknownThen)
	}
	for i, v := range r.Verdicts {
		if i == 0 {
			printVerdict(out, r.Question, v)
			printBalancers(out, r.Balancers)
			continue
		}
		if i == 1 {
			fmt.Fprintln(out)
		}
		fmt.Fprintf(out, "on node %s: %s\n", base.PlainLine(v.Node), headline(v))
	}
	if len(r.Verdicts) > 0 && r.Verdicts[0].Node == "" {
		fmt.Fprintln(out, "\nno node was asked: "+nameOne)
	}
	if r.NotAsked > 0 {
		fmt.Fprintf(out, notAskedText, r.NotAsked)
	}
	return nil
}

// headline is the answer in a few words.
func headline(v *explain.Verdict) string {
	text := string(v.Answer)
	if v.Cause != "" {
		text += ", " + string(v.Cause)
	}
	if v.Mode != "" {
		text += " (mode " + base.PlainLine(v.Mode) + ")"
	}
	return text
}

func printVerdict(out io.Writer, question string, v *explain.Verdict) {
	node := "any node"
	if v.Node != "" {
		node = "node " + base.PlainLine(v.Node)
	}
	fmt.Fprintf(out, "%s on %s: %s\n", base.PlainLine(question), node, headline(v))
	if v.Client.Text != "" {
		where := "outside of all nodes"
		if v.Client.Node != "" {
			where = "on node " + base.PlainLine(v.Client.Node)
		}
		fmt.Fprintf(out, "client %s, %s\n", base.PlainLine(v.Client.Text), where)
	}
	printLines(out, "", v.Lines)
	if v.Remedy != "" {
		fmt.Fprintf(out, "what to do: %s\n", v.Remedy)
	}
	for i := range v.Frontends {
		f := &v.Frontends[i]
		answer := string(f.Answer)
		if f.Cause != "" {
			answer += ", " + string(f.Cause)
		}
		fmt.Fprintf(out, "\n%s %s %s: %s\n", base.PlainLine(f.Kind), base.PlainLine(f.Protocol), base.PlainLine(f.Address), answer)
		printLines(out, "  ", f.Lines)
		if len(f.Proof) > 0 {
			fmt.Fprintln(out, "  read back:")
			printLines(out, "    ", f.Proof)
		}
	}
	printEndpoints(out, v.Endpoints)
}

func printLines(out io.Writer, indent string, lines []explain.Line) {
	for _, l := range lines {
		fmt.Fprintf(out, "%s%s  [%s]\n", indent, base.PlainLine(l.Text), base.PlainLine(l.Source))
	}
}

func printEndpoints(out io.Writer, list []explain.Endpoint) {
	if len(list) == 0 {
		return
	}
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 4, 3, ' ', 0)
	fmt.Fprintln(w, "ENDPOINT\tPOD\tNODE\tCONNECTIONS\tWHY")
	for i, e := range list {
		if i == maxEndpoints {
			fmt.Fprintf(w, "%d more\t\t\t\t\n", len(list)-i)
			break
		}
		may := "no"
		if e.May {
			may = "yes"
		}
		for k, l := range e.Why {
			if k > 0 {
				fmt.Fprintf(w, "\t\t\t\t%s  [%s]\n", base.PlainLine(l.Text), base.PlainLine(l.Source))
				continue
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s  [%s]\n", base.PlainLine(e.Address), base.PlainLine(cmp.Or(e.Pod, "-")),
				base.PlainLine(cmp.Or(e.Node, "-")), may,
				base.PlainLine(l.Text), base.PlainLine(l.Source))
		}
	}
	_ = w.Flush()
}

// maxEndpoints bounds the endpoints that are shown; -o json has all of them.
const maxEndpoints = 50
