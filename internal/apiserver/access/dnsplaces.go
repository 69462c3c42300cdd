package access

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// dnsPlacesOfToken is how many nodes of one join token may always be endpoints of kube-dns: one may fail.
	dnsPlacesOfToken = 2
	// dnsTaken is how long a place counts that was given away and is not in the store yet.
	dnsTaken   = 2 * time.Second
	dnsTimeout = 10 * time.Second
)

// dnsPlaces are the places behind kube-dns, which the DNS servers of nodes take. Whoever has a join token could fill
// kube-dns with machines that give wrong answers, so nodes of one token have dnsPlacesOfToken places, or as many as
// there are other endpoints, if that is more. Nodes that an administrator has approved or chosen (svc.DNSServerLabel),
// and a server's own node, are not counted with a token. Every node answers its own Pods, whether it has a place or not.
type dnsPlaces struct {
	client kubernetes.Interface
	nodes  nodeIndex

	mu    sync.Mutex
	taken map[string]time.Time // by node
}

func newDNSPlaces(client kubernetes.Interface, nodes nodeIndex) *dnsPlaces {
	return &dnsPlaces{client: client, nodes: nodes, taken: map[string]time.Time{}}
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
	behind := map[string]bool{} // nodes
	others := 0
	for i := range list.Items {
		for _, e := range list.Items[i].Endpoints {
			if e.NodeName == nil {
				others++
			} else {
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
	own := 0
	for n := range behind {
		switch {
		case !p.alive(n):
		case p.tokenOf(n) == token:
			own++
		default:
			others++
		}
	}
	if most := max(dnsPlacesOfToken, others); own >= most {
		return fmt.Errorf("%d nodes that joined with the token %s are endpoints of %s/%s, and %d others: no more of this token may be, "+
			"unless an administrator chooses node %s by 'kubectl label node %[6]s %s=true'", own, token, dnsNamespace, svc.DNSService, others, node,
			svc.DNSServerLabel)
	}
	if !dryRun {
		p.taken[node] = now
	}
	return nil
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
