package relay

import (
	"context"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/hubble/api/flow"
	"github.com/fairlead/fairlead/internal/svc"
)

const (
	// maxPods bounds the Pods that are remembered for one question, and podAge for how long.
	maxPods = 2000
	podAge  = 30 * time.Second
)

// pods complete flows by the labels and workloads of Pods.
type pods struct {
	client kubernetes.Interface

	mu    sync.Mutex
	known map[svc.Name]*known
}

type known struct {
	read    time.Time
	once    sync.Once
	peer    *hubble.Peer // nil if there is none
	created metav1.Time
}

func newPods(client kubernetes.Interface) *pods {
	return &pods{client: client, known: map[svc.Name]*known{}}
}

// complete adds what a node does not know of the Pods of a flow. A Pod that is younger than the flow is another one of the name.
func (p *pods) complete(ctx context.Context, f *flow.Flow) {
	for _, e := range []*flow.Endpoint{f.GetSource(), f.GetDestination()} {
		if e.GetPodName() == "" || len(e.GetWorkloads()) > 0 {
			continue
		}
		k := p.of(ctx, svc.Name{Namespace: e.GetNamespace(), Name: e.GetPodName()})
		if k.peer != nil && !k.created.After(f.GetTime().AsTime()) {
			k.peer.Complete(e)
		}
	}
}

func (p *pods) of(ctx context.Context, n svc.Name) *known {
	p.mu.Lock()
	k := p.known[n]
	if k == nil || time.Since(k.read) > podAge {
		if len(p.known) >= maxPods {
			clear(p.known)
		}
		k = &known{read: time.Now()}
		p.known[n] = k
	}
	p.mu.Unlock()
	k.once.Do(func() {
		ctx, cancel := context.WithTimeout(ctx, unaryTimeout)
		defer cancel()
		// The answer comes from the server's memory.
		pod, err := p.client.CoreV1().Pods(n.Namespace).Get(ctx, n.Name, metav1.GetOptions{ResourceVersion: "0"})
		if err == nil {
			k.peer, k.created = hubble.PeerOf(pod), pod.CreationTimestamp
		}
	})
	return k
}
