package proxy

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/table"
)

// recorder records the proxy's Events.
type recorder struct {
	*events.Recorder
	host string
}

func newRecorder(client kubernetes.Interface, host string, log *slog.Logger) *recorder {
	return &recorder{events.NewRecorder(client, corev1.EventSource{Component: "fairlead-proxy", Host: host}, log), host}
}

// node records a Warning on this Node. Like a kubelet, it uses the node's name
// as UID, which is what "kubectl describe node" looks for.
func (r *recorder) node(reason, message string) {
	ref := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: r.host, UID: types.UID(r.host)}
	r.Event(ref, corev1.EventTypeWarning, reason, message)
}

// service records an Event on a Service, or on the Pod that has the name in a Table.
func (r *recorder) service(n svc.Name, uid types.UID, kind, reason, message string) {
	on := &corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: n.Namespace, Name: n.Name, UID: uid}
	if pod, ok := table.PodName(n); ok {
		on.Kind, on.Name = "Pod", pod.Name
	}
	r.Event(on, kind, reason, message)
}

// warn records an Event of each problem.
func (p *Proxy) warn(problems []serviceProblem) {
	for _, problem := range problems {
		p.log.Warn("a service's port on this node is taken or cannot be opened",
			"service", problem.service, "reason", problem.reason, "err", problem.err)
		p.events.service(problem.service, p.builder.UID(problem.service), corev1.EventTypeWarning, problem.reason, problem.err.Error())
	}
}

// report updates counts and problems, and records an Event of each new problem.
func (p *Proxy) report(before *table.Table, keys []table.Key) {
	p.status.built(before, p.wanted, keys)
	p.metrics.built(before, p.wanted, keys)
	p.metrics.servicePorts.Set(float64(p.wanted.Len()))
	overlaps := p.builder.RejectedCIDRs()
	if !slices.Equal(overlaps, p.overlaps) && len(overlaps) > 0 {
		text := strings.Join(overlaps, "; ")
		p.log.Warn("cannot use ranges of service addresses, which would cut this node off; correct the ServiceCIDRs", "err", text)
		p.events.node("ServiceCIDROverlaps", "cannot use ranges of service addresses: "+text)
	}
	p.overlaps = overlaps
	for name, now := range p.builder.NewProblems() {
		known := p.status.setProblems(name, now)
		for _, problem := range now {
			if !slices.Contains(known, problem) {
				p.events.service(problem.Service, p.builder.UID(problem.Service), corev1.EventTypeWarning, problem.Reason, problem.Message)
			}
		}
	}
}

// maxListed bounds how many repairs an Event names.
const maxListed = 10

func (p *Proxy) reportRepairs() {
	r, ok := p.opts.Dataplane.(Repairer)
	if !ok {
		return
	}
	repaired := r.Repaired()
	p.status.repaired(repaired)
	if len(repaired) == 0 {
		return
	}
	p.metrics.repairs.Add(float64(len(repaired)))
	text := strings.Join(repaired[:min(len(repaired), maxListed)], "; ")
	if more := len(repaired) - maxListed; more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	p.log.Warn("repaired rules that were removed or altered from outside", "repaired", text)
	p.events.node("ServiceRulesRepaired", "repaired rules that were removed or altered from outside: "+text)
}

// serviceProblem is a problem of a Service that only this node can detect.
type serviceProblem struct {
	service svc.Name
	reason  string
	err     error
}
