package proxy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/loop"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// Status is what a Proxy has done and what is wrong, as /status and "fairlead status -o json" show it.
type Status struct {
	Node string `json:"node"`
	Mode string `json:"mode"`
	// ConnectTime and ConnectTimeCgroup have the values of Options.
	ConnectTime       string `json:"connectTime,omitempty"`
	ConnectTimeCgroup string `json:"connectTimeCgroup,omitempty"`
	// Programmed is true if the kernel answers for Services as the API says, as
	// far as known; Reason and Message give the cause.
	Programmed bool   `json:"programmed"`
	Reason     string `json:"reason"`
	Message    string `json:"message"`
	// ServicePorts, Frontends and Endpoints count the desired state, endpoints
	// once per service port and policy.
	ServicePorts int `json:"servicePorts"`
	Frontends    int `json:"frontends"`
	Endpoints    int `json:"endpoints"`
	// Applies counts how often something was programmed since the start.
	Applies           int       `json:"applies"`
	LastApply         time.Time `json:"lastApply,omitzero"`
	LastApplyDuration Duration  `json:"lastApplyDuration"`
	// LastError is that of the last Apply, empty if it went well.
	LastError string    `json:"lastError,omitempty"`
	LastAudit time.Time `json:"lastAudit,omitzero"`
	// Repaired is the drift repaired by the last audit that found some.
	Repaired   []string  `json:"repaired,omitempty"`
	RepairedAt time.Time `json:"repairedAt,omitzero"`
	// Problems are of Services that cannot be programmed as written.
	Problems []Problem `json:"problems,omitempty"`
}

// Duration is written as text, for example "1.5ms".
type Duration time.Duration

// MarshalText writes the text form.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText reads the text form.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	*d = Duration(v)
	return err
}

// Problem is the JSON form of a table.Problem.
type Problem struct {
	Service string `json:"service"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// The reasons of ServicesProgrammed.
const (
	reasonStarting   = "Starting"
	reasonProgrammed = "Programmed"
	reasonFailed     = "ProgrammingFailed"
)

// status is written by the loop and read from any goroutine.
type status struct {
	table atomic.Pointer[table.Table]
	// changed holds a token, see Proxy.Changed.
	changed loop.Signal

	mu sync.Mutex
	s  Status
	// problems has an entry for each Service with problems.
	problems map[svc.Name][]table.Problem
	node     *corev1.Node // as last seen, nil if there is none
}

func newStatus(node, mode string) *status {
	return &status{changed: loop.NewSignal(), problems: map[svc.Name][]table.Problem{}, s: Status{
		Node: node, Mode: mode, Reason: reasonStarting, Message: "waiting for the first list of Services and EndpointSlices",
	}}
}

func (st *status) get() Status {
	st.mu.Lock()
	defer st.mu.Unlock()
	s := st.s // slices in it are replaced, never written to
	for _, n := range slices.SortedFunc(maps.Keys(st.problems), svc.Name.Compare) {
		for _, p := range st.problems[n] {
			s.Problems = append(s.Problems, Problem{p.Service.String(), p.Reason, p.Message})
		}
	}
	return s
}

// Condition returns the Node condition ServicesProgrammed.
func (s Status) Condition() corev1.NodeCondition {
	c := corev1.NodeCondition{Type: svc.ServicesProgrammed, Status: corev1.ConditionFalse, Reason: s.Reason, Message: s.Message}
	if s.Programmed {
		c.Status = corev1.ConditionTrue
	}
	return c
}

// notify leaves a token for the receiver of Proxy.Changed.
func (st *status) notify() {
	st.changed.Set()
}

func (st *status) ownNode() *corev1.Node {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.node
}

func (st *status) setNode(n *corev1.Node) {
	st.mu.Lock()
	st.node = n
	st.mu.Unlock()
	st.notify()
}

// built records a new Table, which differs from before (nil: empty) in keys.
func (st *status) built(before, after *table.Table, keys []table.Key) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, k := range keys {
		if before != nil {
			st.count(before.Get(k), -1)
		}
		st.count(after.Get(k), 1)
	}
}

// setProblems replaces the problems of a Service and returns the former ones.
func (st *status) setProblems(n svc.Name, now []table.Problem) (before []table.Problem) {
	st.mu.Lock()
	defer st.mu.Unlock()
	before = st.problems[n]
	st.problems[n] = now
	if len(now) == 0 {
		delete(st.problems, n)
	}
	return before
}

func (st *status) count(p *table.ServicePort, sign int) {
	if p == nil {
		return
	}
	st.s.ServicePorts += sign
	st.s.Frontends += sign * len(p.Frontends)
	var counted []*table.Endpoint // lists are shared among frontends
	for i := range p.Frontends {
		for _, list := range [][]table.Endpoint{p.Frontends[i].Endpoints, p.Frontends[i].LocalClients} {
			if len(list) == 0 || slices.Contains(counted, &list[0]) {
				continue
			}
			counted = append(counted, &list[0])
			st.s.Endpoints += sign * len(list)
		}
	}
}

// applied records the end of an Apply, and the number of ports that are rejected
// by it or an earlier one.
func (st *status) applied(start time.Time, took time.Duration, audit bool, err error, rejected int) {
	st.mu.Lock()
	defer func() {
		st.mu.Unlock()
		st.notify()
	}()
	st.s.Applies++
	st.s.LastApply, st.s.LastApplyDuration = start, Duration(took)
	if audit {
		st.s.LastAudit = start
	}
	if err != nil {
		st.s.LastError = err.Error()
		st.s.Programmed, st.s.Reason, st.s.Message = false, reasonFailed, firstLine(err)
		return
	}
	if rejected > 0 {
		return // LastError is still theirs
	}
	st.s.LastError = ""
	st.s.Programmed, st.s.Reason = true, reasonProgrammed
	st.s.Message = "mode " + st.s.Mode
	if st.s.Mode == "" {
		st.s.Message = "services are programmed"
	}
}

// firstLine keeps a condition's message short: joined errors have a line each.
func firstLine(err error) string {
	line, rest, more := strings.Cut(err.Error(), "\n")
	if more {
		line += fmt.Sprintf(" (and %d more)", 1+strings.Count(rest, "\n"))
	}
	return line
}

func (st *status) repaired(what []string) {
	if len(what) == 0 {
		return
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.s.Repaired, st.s.RepairedAt = what, time.Now()
}
