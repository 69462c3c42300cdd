package access

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// dnsMarks is how many slices of others the nodes of one join token may mark unready at once, dnsMarkPeriod how soon
	// the next one: a server that still answers lists itself again at once.
	dnsMarks      = 4
	dnsMarkPeriod = 10 * time.Second
	// dnsTaken is how long a place counts that was given away and is not in the store yet.
	dnsTaken   = 2 * time.Second
	dnsTimeout = 10 * time.Second
)

// dnsPlaces are the places behind kube-dns, which the DNS servers of nodes take. Whoever has a join token could fill
// kube-dns with machines that give wrong answers, so nodes of one token have as many places as placesBeside
// allows. Nodes that an administrator has approved or chosen (svc.DNSServerLabel), and a server's own node, are not counted with
// a token. Every node answers its own Pods, whether it has a place or not.
type dnsPlaces struct {
	client kubernetes.Interface
	nodes  nodeIndex

	mu    sync.Mutex
	taken map[string]time.Time                      // by node
	marks map[string]flowcontrol.PassiveRateLimiter // by token
}

// placesBeside is how many nodes of one join token may be endpoints beside others: no more than these, so that they are not the
// majority. Where there are no others, none can be outvoted, and one of two may fail.
func placesBeside(others int) int {
	if others == 0 {
		return 2
	}
	return others
}

func newDNSPlaces(client kubernetes.Interface, nodes nodeIndex) *dnsPlaces {
	return &dnsPlaces{client: client, nodes: nodes, taken: map[string]time.Time{}, marks: map[string]flowcontrol.PassiveRateLimiter{}}
}

// take returns an error if there is no place for the DNS server of a node.
func (p *dnsPlaces) take(ctx context.Context, node string, u user.Info, dryRun bool) error {
	token := tokenIn(u.GetUID())
	if token == "" || p.tokenOf(node) == "" {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, dnsTimeout)
	defer cancel()
	list, err := p.client.DiscoveryV1().EndpointSlices(dnsNamespace).List(ctx, metav1.ListOptions{
		LabelSelector: discoveryv1.LabelServiceName + "=" + svc.DNSService})
	if err != nil {
		return fmt.Errorf("cannot count the endpoints of %s/%s: %w", dnsNamespace, svc.DNSService, err)
	}
	now := time.Now()
	behind := map[string]bool{}                   // nodes
	nameless := map[discoveryv1.AddressType]int{} // a server may have an endpoint of each family
	for i := range list.Items {
		for _, e := range list.Items[i].Endpoints {
			switch {
			case !inUse(&e):
			case e.NodeName == nil:
				nameless[list.Items[i].AddressType]++
			default:
				behind[*e.NodeName] = true
			}
		}
	}
	for n, at := range p.taken {
		if now.Sub(at) > dnsTaken {
			delete(p.taken, n)
		} else {
			behind[n] = true
		}
	}
	delete(behind, node)
	own, others := 0, max(nameless[discoveryv1.AddressTypeIPv4], nameless[discoveryv1.AddressTypeIPv6])
	for n := range behind {
		switch {
		case p.tokenOf(n) == token:
			own++ // also one that is Unknown: it may answer again
		case p.alive(n):
			others++
		}
	}
	if own >= placesBeside(others) {
		return fmt.Errorf("%d nodes that joined with the token %s are endpoints of %s/%s, and %d others: no more of this token may be, "+
			"unless an administrator chooses node %s by 'kubectl label node %[6]s %s=true'", own, token, dnsNamespace, svc.DNSService, others, node,
			svc.DNSServerLabel)
	}
	if !dryRun {
		p.taken[node] = now
	}
	return nil
}

// mayMark returns an error if a node may not mark an endpoint of another one's slice unready now.
func (p *dnsPlaces) mayMark(slice *discoveryv1.EndpointSlice, node string, u user.Info, dryRun bool) error {
	token := tokenIn(u.GetUID())
	if token == "" || p.tokenOf(node) == "" || !anyInUse(slice) {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	l := p.marks[token]
	if l == nil {
		l = flowcontrol.NewTokenBucketPassiveRateLimiter(float32(time.Second)/float32(dnsMarkPeriod), dnsMarks)
		p.marks[token] = l
	}
	if dryRun || l.TryAccept() {
		return nil
	}
	return fmt.Errorf("the nodes that joined with the token %s have marked %d EndpointSlices of %s/%s unready in a short time: retry in %s",
		token, dnsMarks, dnsNamespace, svc.DNSService, dnsMarkPeriod)
}

// inUse reports whether clients may be led to an endpoint: to one that serves and is not ready where no other is ready.
func inUse(e *discoveryv1.Endpoint) bool {
	no := func(b *bool) bool { return b != nil && !*b }
	return !no(e.Conditions.Ready) || !no(e.Conditions.Serving)
}

func anyInUse(s *discoveryv1.EndpointSlice) bool {
	return s != nil && slices.ContainsFunc(s.Endpoints, func(e discoveryv1.Endpoint) bool { return inUse(&e) })
}

// alive reports whether a Node exists and is not known to be dead.
func (p *dnsPlaces) alive(node string) bool {
	n, err := p.nodes.Get(node)
	if err != nil {
		return false
	}
	for i := range n.Status.Conditions {
		if c := &n.Status.Conditions[i]; c.Type == corev1.NodeReady {
			return c.Status != corev1.ConditionUnknown
		}
	}
	return true
}

// tokenOf returns the join token with which a node counts, "" for one of an administrator.
func (p *dnsPlaces) tokenOf(node string) string {
	n, err := p.nodes.Get(node)
	if err != nil || n.Labels[svc.DNSServerLabel] == "true" {
		return ""
	}
	return tokenIn(n.Annotations[nodeIdentity])
}
