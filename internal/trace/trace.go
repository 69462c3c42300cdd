// Package trace shows what became of one packet that a node has sent, hop by hop, and which rule, element or object decided that.
// It is pure: what the node has seen and the objects go in, and a Report comes out. Package follow sends the packet.
package trace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/internal/explain"
)

// Seen is what a node has seen of a packet. Its JSON form goes from an agent to the command: fields are only ever added.
type Seen struct {
	Node string `json:"node"`
	Mode string `json:"mode,omitempty"`
	// ConnectTime is "on" if the node translates connections of its processes before they send a packet, as proxy.Status has it.
	ConnectTime string `json:"connectTime,omitempty"`

	Protocol    string         `json:"protocol"`
	Source      netip.AddrPort `json:"source"`
	Destination netip.AddrPort `json:"destination"`
	// Answer is what came back, Error the kernel's words for it.
	Answer Answer `json:"answer"`
	Error  string `json:"error,omitempty"`
	// Untraced is why there are no Steps, or not all.
	Untraced string `json:"untraced,omitempty"`
	Steps    []Step `json:"steps,omitempty"`
	// More is how many Steps were left out.
	More int `json:"more,omitempty"`
	// Undescribed is how many Steps with rules have no Text, since reading the others took too long.
	Undescribed int `json:"undescribed,omitempty"`
	// Facts are what the node has for the destination; nil if the user may not know, or nobody was asked.
	Facts *explain.Facts `json:"facts,omitempty"`
}

// Answer is what came back to a packet.
type Answer string

// The answers.
const (
	NoAnswer Answer = "none"
	Accepted Answer = "accepted" // of TCP a segment with SYN and ACK, of UDP a datagram
	Reset    Answer = "reset"    // of TCP a segment with RST
	Rejected Answer = "rejected" // an ICMP error, or a rejecting route
	NoRoute  Answer = "no route" // the packet was not sent
)

// Step is one thing that happened to the packet.
type Step struct {
	// Space is whose network namespace it was in: of a Pod or of a node.
	Space string `json:"space"`
	// Hook is the place: prerouting, input, forward, output or postrouting.
	Hook string `json:"hook"`
	// Passed is set where the packet was seen at the begin or the end of the Hook, with the fields to Destination.
	Passed      bool           `json:"passed,omitempty"`
	In          string         `json:"in,omitempty"`
	Out         string         `json:"out,omitempty"`
	Source      netip.AddrPort `json:"source,omitzero"`
	Destination netip.AddrPort `json:"destination,omitzero"`
	// Table, Chain and Handle are of a rule or a chain otherwise. Text is the rule in words.
	Table  string `json:"table,omitempty"`
	Chain  string `json:"chain,omitempty"`
	Handle uint64 `json:"handle,omitempty"`
	Text   string `json:"text,omitempty"`
	// Kind is rule, policy or return, Verdict a word of nft(8).
	Kind    string `json:"kind,omitempty"`
	Verdict string `json:"verdict,omitempty"`
	// Ours is set for fairlead's rules.
	Ours bool `json:"ours,omitempty"`
}

// Drop is the Verdict of a rule that drops or rejects.
const Drop = "drop"

// Place is where the rule of a step is, such as "table ip fairlead chain output rule 12".
func (s *Step) Place() string {
	text := fmt.Sprintf("table %s chain %s", s.Table, s.Chain)
	if s.Handle != 0 {
		text += fmt.Sprintf(" rule %d", s.Handle)
	}
	return text
}

// Hide leaves out what users without rights on the node may not know: the rules of other programs, but for the chain that they are
// in and what they did, and the Facts.
func (s *Seen) Hide() {
	s.Facts = nil
	for i := range s.Steps {
		if st := &s.Steps[i]; !st.Ours {
			st.Text, st.Handle = "", 0
		}
	}
}

// Report is what 'fairlead trace' shows. Its JSON form is meant for programs: fields are only ever added.
type Report struct {
	From string `json:"from"`
	To   string `json:"to"`
	// Service is the one that has the destination, empty if none.
	Service string `json:"service,omitempty"`
	// Result is what a client sees.
	Result explain.Answer `json:"result"`
	// Endpoint is where the packet went at last, if that is another address than its destination. Pod is the Pod there, as
	// NAMESPACE/NAME.
	Endpoint netip.AddrPort `json:"endpoint,omitzero"`
	Pod      string         `json:"pod,omitempty"`
	// Decision is the statement that the Result follows from, and Why what the objects say about it.
	Decision explain.Line   `json:"decision"`
	Why      []explain.Line `json:"why,omitempty"`
	// Elements are what the node has for the destination, as read back.
	Elements []explain.Line `json:"elements,omitempty"`
	// Next is the node that the packet went on to, nil if it went to none.
	Next *Next `json:"next,omitempty"`
	// Notes are what the trace does not show.
	Notes []string `json:"notes,omitempty"`
	Seen  *Seen    `json:"seen"`
}

// Next is where the way of a packet goes on beyond the node that the trace shows.
type Next struct {
	// From is the node that passed the packet on by Device, to Address on Node.
	From    string         `json:"from"`
	Device  string         `json:"device,omitempty"`
	Node    string         `json:"node"`
	Address netip.AddrPort `json:"address"`
	// Command shows what that node does with a packet of its own to the same endpoint.
	Command string `json:"command"`
}

// Tell returns the Report of a packet. v is what becomes of connections to its destination by the objects and by what the node has;
// nil without objects.
func Tell(from, to string, s *Seen, v *explain.Verdict) *Report {
	r := &Report{From: from, To: to, Seen: s}
	r.place()
	if v != nil {
		r.Service = v.Service
		for _, e := range v.Endpoints {
			if namespace, _, ok := strings.Cut(v.Service, "/"); ok && e.Pod != "" && r.Endpoint.IsValid() && e.Address == r.Endpoint.String() {
				r.Pod = namespace + "/" + e.Pod
			}
		}
		r.elements(v)
		r.next(v)
	}
	r.decide(v)
	r.notes()
	return r
}

// place finds where the packet went.
func (r *Report) place() {
	for i := range r.Seen.Steps {
		if st := &r.Seen.Steps[i]; st.Passed && st.Destination.IsValid() {
			r.Endpoint = st.Destination
		}
	}
	if r.Endpoint == r.Seen.Destination {
		r.Endpoint = netip.AddrPort{}
	}
}

// next finds the node that has the endpoint, if the packet left its own node.
func (r *Report) next(v *explain.Verdict) {
	i := len(r.Seen.Steps) - 1
	for i >= 0 && !r.Seen.Steps[i].Passed {
		i--
	}
	if i < 0 || r.Seen.Steps[i].Hook != "postrouting" {
		return
	}
	end := &r.Seen.Steps[i]
	from, ofNode := strings.CutPrefix(end.Space, "node ")
	for _, e := range v.Endpoints {
		if !ofNode || e.Address != end.Destination.String() || e.Node == "" || e.Node == from {
			continue
		}
		command := fmt.Sprintf("fairlead trace %s %s", e.Node, end.Destination)
		if r.Seen.Protocol != "TCP" {
			command += " --protocol " + r.Seen.Protocol
		}
		r.Next = &Next{From: from, Device: end.Out, Node: e.Node, Address: end.Destination, Command: command}
		return
	}
}

// elements takes the proof of the destination's frontend, without endpoints that the packet did not go to.
func (r *Report) elements(v *explain.Verdict) {
	for i := range v.Frontends {
		for _, l := range v.Frontends[i].Proof {
			if at, err := netip.ParseAddrPort(l.Text); err == nil && r.Endpoint.IsValid() && at != r.Endpoint {
				continue
			}
			if !slices.Contains(r.Elements, l) {
				r.Elements = append(r.Elements, l)
			}
		}
	}
}

// decide finds the statement that the result follows from.
func (r *Report) decide(v *explain.Verdict) {
	s := r.Seen
	r.Result = map[Answer]explain.Answer{Accepted: explain.Answers, Reset: explain.Refused, Rejected: explain.Refused}[s.Answer]
	if r.Result == "" {
		r.Result = explain.Dropped
	}
	drop := slices.IndexFunc(s.Steps, func(st Step) bool { return !st.Passed && st.Verdict == Drop })
	switch {
	case s.Answer == NoRoute:
		r.Decision = explain.Line{Text: s.Error, Source: "routes of " + r.From}
	case drop >= 0 && s.Answer != Accepted:
		r.dropped(&s.Steps[drop], v)
	case s.Answer == Accepted:
		text := r.where() + " answered"
		if r.byProxy(v) {
			text = fmt.Sprintf("the proxy of the node, which carries connections itself, answered at %s", r.Endpoint)
		}
		r.Decision = explain.Line{Text: text, Source: "answer to " + s.Source.String()}
		if r.Endpoint.IsValid() {
			r.Why = because(v)
		}
	case s.Answer == Reset:
		r.Decision = explain.Line{Text: r.where() + " refuses: nothing listens there", Source: "answer to " + s.Source.String()}
	case s.Answer == Rejected:
		r.Decision = explain.Line{Text: "an ICMP error came back: " + s.Error, Source: "answer to " + s.Source.String()}
	default:
		r.lost()
	}
	if drop < 0 && s.Answer != Accepted && s.Answer != NoRoute {
		r.Why = because(v)
	}
}

// dropped is for a packet that a rule, or a policy, has dropped or rejected.
func (r *Report) dropped(st *Step, v *explain.Verdict) {
	what := "drops"
	if r.Result == explain.Refused {
		what = "rejects"
	}
	text := "a rule of another program " + what + " it"
	switch {
	case st.Ours:
		text = fmt.Sprintf("fairlead %s it in chain %s", what, st.Chain)
		r.Why = because(v)
	case st.Kind == "policy":
		text = fmt.Sprintf("another program %s it, by the policy of chain %s", what, st.Chain)
	case st.Text != "":
		text += ": " + st.Text
	}
	r.Decision = explain.Line{Text: text, Source: st.Space + ": " + st.Place()}
}

// byProxy reports whether the packet went to the proxy itself, in mode userspace, and not to an endpoint.
func (r *Report) byProxy(v *explain.Verdict) bool {
	return r.Seen.Mode == "userspace" && r.Service != "" && r.Endpoint.IsValid() &&
		!slices.ContainsFunc(v.Endpoints, func(e explain.Endpoint) bool { return e.Address == r.Endpoint.String() })
}

// because are the lines of a verdict that say why: the decisions of the frontend, else of the Service.
func because(v *explain.Verdict) []explain.Line {
	if v == nil {
		return nil
	}
	lines := v.Lines
	if len(v.Frontends) > 0 && len(v.Frontends[0].Lines) > 0 {
		lines = v.Frontends[0].Lines
	}
	return lines[max(len(lines)-1, 0):]
}

// where is the place that an answer comes from.
func (r *Report) where() string {
	switch {
	case r.Endpoint.IsValid() && r.Pod != "":
		return fmt.Sprintf("endpoint %s (Pod %s)", r.Endpoint, r.Pod)
	case r.Endpoint.IsValid():
		return "endpoint " + r.Endpoint.String()
	}
	return r.Seen.Destination.String()
}

// lost is for a packet that nothing came back to, and that no rule dropped.
func (r *Report) lost() {
	var end *Step
	for i := range r.Seen.Steps {
		if r.Seen.Steps[i].Passed {
			end = &r.Seen.Steps[i]
		}
	}
	switch {
	case end == nil:
		r.Decision = explain.Line{Text: "the packet was sent, and nothing answers", Source: "packet from " + r.Seen.Source.String()}
	case end.Hook == "postrouting":
		r.Decision = explain.Line{
			Text:   fmt.Sprintf("the packet left %s by %s to %s, and nothing answers", end.Space, end.Out, r.where()),
			Source: end.Space + ": " + end.Hook,
		}
	case end.Hook == "input":
		r.Decision = explain.Line{Text: "the packet arrived at " + r.where() + ", and nothing answers", Source: end.Space + ": " + end.Hook}
	default:
		r.Decision = explain.Line{
			Text: fmt.Sprintf("the packet to %s was last seen in %s, and no rule of nf_tables dropped it: there is no route, the source is not "+
				"accepted (rp_filter), or iptables-legacy drops it", r.where(), end.Hook),
			Source: end.Space + ": " + end.Hook,
		}
	}
}

// notes are about what the trace does not show.
func (r *Report) notes() {
	s := r.Seen
	if s.Untraced != "" {
		r.Notes = append(r.Notes, "rules are not shown: "+s.Untraced)
	}
	if s.Undescribed > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d rules are shown without their text: reading the others took more than a second",
			s.Undescribed))
	}
	if s.Protocol == "UDP" && s.Answer == NoAnswer {
		r.Notes = append(r.Notes, "a program that got the empty datagram need not answer it")
	}
	if s.ConnectTime == "on" && r.Service != "" {
		r.Notes = append(r.Notes, "the node translates connections of processes at connect(2): the packet of a process has the address of an "+
			"endpoint from the start, and does not meet the rules for Services")
	}
	if s.Mode == "userspace" && r.Service != "" {
		r.Notes = append(r.Notes, "mode userspace takes connections itself: its own connection to the endpoint is another packet")
	}
}
