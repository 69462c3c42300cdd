// Package explain decides what becomes of a connection to a Service on one node, and names the field
// and object behind each step, and what the node really has. It is pure: objects, and what a node
// reports of its table and its kernel, go in, and a Verdict comes out. It has no client, clock or lock.
package explain

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/fairlead/fairlead/internal/svc"
)

// Cause is what keeps a connection from an endpoint.
type Cause string

// The causes. The empty Cause stands for a connection that reaches an endpoint.
const (
	NoService       Cause = "NoService"
	NoEndpoint      Cause = "NoEndpoint"
	Unready         Cause = "Unready"
	Terminating     Cause = "Terminating"
	WrongTargetPort Cause = "WrongTargetPort"
	PolicyLocal     Cause = "PolicyLocal"
	SourceRange     Cause = "SourceRange"
	WeightZero      Cause = "WeightZero"
	AffinityDead    Cause = "AffinityToDeadEndpoint"
	Rejected        Cause = "RejectedByKernel"
	NameUnknown     Cause = "NameUnknown"
	NoRoute         Cause = "NoRouteOrDropped"
)

// Causes are all of them, in the order in which they are documented.
func Causes() []Cause {
	return []Cause{NoService, NoEndpoint, Unready, Terminating, WrongTargetPort, PolicyLocal, SourceRange, WeightZero, AffinityDead,
		Rejected, NameUnknown, NoRoute}
}

// Answer is what a client sees.
type Answer string

// The answers. Sometimes is for a connection that may go to an endpoint that answers, or to one that
// does not. Sent is for a packet that goes to an endpoint which may answer or not: agents probe only TCP.
// Unknown is for an earlier time of which the node knows nothing.
const (
	Answers   Answer = "answers"
	Sent      Answer = "sent, not probed"
	Refused   Answer = "refused"
	Dropped   Answer = "timeout"
	Sometimes Answer = "sometimes"
	NoName    Answer = "no such name"
	Elsewhere Answer = "not a Service"
	Unknown   Answer = "not known"
)

// Question has one of Service, Name and Address.
type Question struct {
	Service svc.Name
	// Name is a DNS name as a client asks for it.
	Name string
	// Address is where a client connects to, by Protocol; 0 is any.
	Address  netip.AddrPort
	Protocol svc.Protocol
	// Client is who connects.
	Client Client
	// Then is set if the Facts are of an earlier time: objects of that time are not known.
	Then bool
}

// Client is where a connection comes from.
type Client struct {
	// Text is how the user named it, empty for any client.
	Text string `json:"text,omitempty"`
	// Addrs are its addresses, one of each family at most; none for any client.
	Addrs []netip.Addr `json:"addresses,omitempty"`
	// Node is the node that it is on, empty for a client outside of all nodes.
	Node string `json:"node,omitempty"`
	// Host reports that it is the node itself, not a Pod of it.
	Host bool `json:"-"`
}

// Addr returns the client's address of the family of another one, not valid if it has none.
func (c *Client) Addr(like netip.Addr) netip.Addr {
	for _, a := range c.Addrs {
		if a.Is4() == like.Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// Objects are what the API has.
type Objects struct {
	Services []*corev1.Service
	// Slices and Pods have at least the namespace of the Service asked about.
	Slices []*discoveryv1.EndpointSlice
	Pods   []*corev1.Pod
	// Node is the node that the question is about, nil if it may not be read.
	Node *corev1.Node
	// Domains are the cluster domains; Namespaces the names of all namespaces, nil if they may not be read.
	Domains    []string
	Namespaces []string
	// Unannounced are addresses of load balancers that no node announces, by text, with the line that says so.
	Unannounced map[string]Line
	// Policies are the NetworkPolicies that may concern the question, nil if the API has no such kind.
	Policies *Policies
	// PodTrouble returns what keeps a Pod from being ready, in one line.
	PodTrouble func(*corev1.Pod) string
}

// Line is one statement, with where it comes from: an object with a field, or an element of the kernel.
type Line struct {
	Text   string `json:"text"`
	Source string `json:"source"`
}

// Verdict is the answer for one node.
type Verdict struct {
	Node string `json:"node"`
	Mode string `json:"mode,omitempty"`
	// Service is the Service that the question leads to, empty if none.
	Service string `json:"service,omitempty"`
	Client  Client `json:"client"`
	// Answer and Cause are the worst of the Frontends.
	Answer Answer `json:"answer"`
	Cause  Cause  `json:"cause,omitempty"`
	// Remedy is what to do about the Cause.
	Remedy string `json:"remedy,omitempty"`
	// Lines are about the Service as a whole.
	Lines     []Line     `json:"lines,omitempty"`
	Frontends []Frontend `json:"frontends,omitempty"`
	Endpoints []Endpoint `json:"endpoints,omitempty"`
}

// Frontend is what becomes of connections to one address of a Service.
type Frontend struct {
	Kind     string `json:"kind"`
	Protocol string `json:"protocol"`
	Address  string `json:"address"`
	Port     string `json:"port"`
	Answer   Answer `json:"answer"`
	Cause    Cause  `json:"cause,omitempty"`
	// Endpoints are the endpoints that a new connection may go to.
	Endpoints []netip.AddrPort `json:"endpoints,omitempty"`
	Lines     []Line           `json:"lines,omitempty"`
	// Proof is what the node has, as read back for this answer.
	Proof []Line `json:"proof,omitempty"`
	// masked is set if endpoints see an address of the node as the client.
	masked bool
}

// Endpoint is one endpoint of the Service, and whether new connections may go there.
type Endpoint struct {
	Address string `json:"address"`
	Pod     string `json:"pod,omitempty"`
	Node    string `json:"node,omitempty"`
	// May reports that a new connection may go there from this node and client.
	May bool   `json:"may"`
	Why []Line `json:"why"`
}

// severity orders answers: the worst is what a Verdict begins with.
func severity(a Answer) int {
	switch a {
	case Answers, Unknown:
		return 0
	case Sent:
		return 1
	case Sometimes:
		return 2
	case Refused:
		return 3
	}
	return 4
}

// Explain answers a question for the node of facts.
func Explain(q *Question, o *Objects, facts *Facts) *Verdict {
	v := &Verdict{Node: facts.Node, Mode: facts.Mode, Client: q.Client, Answer: Answers}
	defer func() { v.Remedy = v.Cause.Remedy() }()
	e := &explaining{question: q, objects: o, facts: facts, verdict: v}
	if facts.Problem != "" {
		source := "agent of node " + facts.Node
		if facts.Node == "" {
			source = "Nodes"
		}
		v.add("what this node has is not known: "+facts.Problem, source)
	}
	if o.Policies != nil {
		v.Lines = append(v.Lines, o.Policies.Unread...)
	}
	if q.Name != "" && !e.name() {
		return v
	}
	if q.Address.IsValid() {
		e.address()
	} else {
		e.service(e.target)
	}
	return v
}

// explaining is one question on its way.
type explaining struct {
	question *Question
	objects  *Objects
	facts    *Facts
	verdict  *Verdict
	// target is the Service that the question leads to.
	target svc.Name
	// open has the tracked connections by endpoint, nil before the first look.
	open map[netip.AddrPort]uint64
}

func (v *Verdict) add(text, source string) { v.Lines = append(v.Lines, Line{text, source}) }

// end is the end of a question that leads to no frontend.
func (v *Verdict) end(a Answer, c Cause, text, source string) {
	v.Answer, v.Cause = a, c
	v.add(text, source)
}

func (f *Frontend) add(text, source string) { f.Lines = append(f.Lines, Line{text, source}) }

func (f *Frontend) end(a Answer, c Cause, text, source string) {
	f.Answer, f.Cause = a, c
	f.add(text, source)
}

func (o *Objects) find(n svc.Name) *corev1.Service {
	for _, s := range o.Services {
		if svc.NameOf(s) == n {
			return s
		}
	}
	return nil
}

// about is the source that names an object and its field.
func about(kind string, n svc.Name, field string) string {
	return kind + " " + n.String() + " " + field
}

// Worse orders answers, the worst one first.
func Worse(a, b Answer) int { return severity(b) - severity(a) }
