package resourcemetrics

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/fairlead/fairlead/internal/registry/node"
)

const (
	// fresh is how long a measurement serves further requests: kubectl top, k9s and dashboards ask every few seconds.
	fresh = 5 * time.Second
	// kept is after what time a measurement that nobody asked for again is forgotten.
	kept = time.Minute
	// askTimeout bounds the request to an agent, which measures for half a second.
	askTimeout = 5 * time.Second
	// askedAtOnce is how many agents one request asks at a time: 5,000 have answered after 10 s.
	askedAtOnce = 256
	// maxSummary bounds the answer of an agent in bytes: 1,000 Pods have some 500 KB.
	maxSummary = 16 << 20
)

// summary is what an agent answers at /stats/summary: the part of kubelet's Summary (k8s.io/kubelet/pkg/apis/stats/v1alpha1)
// that becomes metrics.
type summary struct {
	Node usage      `json:"node"`
	Pods []podUsage `json:"pods"`
}

// podUsage is the usage of a Pod's containers.
type podUsage struct {
	PodRef struct {
		Name, Namespace, UID string
	} `json:"podRef"`
	Containers []containerUsage `json:"containers"`
}

// containerUsage is the usage of a container.
type containerUsage struct {
	Name string `json:"name"`
	usage
}

// usage is processors in billionths and memory in bytes; nil where they are not measured.
type usage struct {
	CPU *struct {
		Time           time.Time `json:"time"`
		UsageNanoCores uint64    `json:"usageNanoCores"`
	} `json:"cpu"`
	Memory *struct {
		WorkingSetBytes uint64 `json:"workingSetBytes"`
	} `json:"memory"`
}

// measured reports whether u has numbers.
func (u usage) measured() bool { return u.CPU != nil && u.Memory != nil }

// finder finds the agents of nodes; *node.Agents does.
type finder interface {
	Find(ctx context.Context, name string) (*node.Agent, error)
}

// collector asks agents for their summaries, each at most once in the time fresh, however many ask.
type collector struct {
	agents finder

	mu    sync.Mutex
	nodes map[string]*measurement
}

// measurement is the last answer of an agent.
type measurement struct {
	mu      sync.Mutex // held while the agent is asked
	asked   time.Time
	summary *summary
	err     error
}

func newCollector(agents finder) *collector {
	return &collector{agents: agents, nodes: map[string]*measurement{}}
}

// all returns the summaries of nodes by name, and why others have none.
func (c *collector) all(ctx context.Context, nodes []string) (map[string]*summary, map[string]error) {
	var (
		mu        sync.Mutex
		wg        sync.WaitGroup
		summaries = map[string]*summary{}
		failed    = map[string]error{}
		places    = make(chan struct{}, askedAtOnce)
	)
	for _, name := range nodes {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			s, err := c.of(ctx, name)
			mu.Lock()
			defer mu.Unlock()
			if summaries[name] = s; err != nil {
				delete(summaries, name)
				failed[name] = err
			}
		})
	}
	wg.Wait()
	return summaries, failed
}

// of returns the summary of a node, which is no older than fresh.
func (c *collector) of(ctx context.Context, name string) (*summary, error) {
	m := c.measurement(name)
	m.mu.Lock()
	defer m.mu.Unlock()
	if time.Since(m.asked) < fresh {
		return m.summary, m.err
	}
	// Others wait for the answer too, so it does not end with the request that began it.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
	defer cancel()
	m.summary, m.err = c.ask(ctx, name)
	m.asked = time.Now()
	return m.summary, m.err
}

// measurement returns the place of a node's answers, and forgets old ones of others.
func (c *collector) measurement(name string) *measurement {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := c.nodes[name]
	if m != nil {
		return m
	}
	for other, old := range c.nodes {
		if old.mu.TryLock() {
			if time.Since(old.asked) > kept {
				delete(c.nodes, other)
			}
			old.mu.Unlock()
		}
	}
	m = &measurement{}
	c.nodes[name] = m
	return m
}

// ask asks the agent of a node.
func (c *collector) ask(ctx context.Context, name string) (*summary, error) {
	agent, err := c.agents.Find(ctx, name)
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, agent.Base.String()+"/stats/summary", http.NoBody)
	if err != nil {
		return nil, err
	}
	answer, err := agent.Transport.RoundTrip(r)
	if err != nil {
		return nil, apierrors.NewServiceUnavailable(fmt.Sprintf("cannot ask the agent of node %s: %v", name, err))
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		return nil, apierrors.NewServiceUnavailable(fmt.Sprintf("the agent of node %s answers %s", name, answer.Status))
	}
	s := &summary{}
	if err := json.NewDecoder(io.LimitReader(answer.Body, maxSummary)).Decode(s); err != nil {
		return nil, apierrors.NewServiceUnavailable(fmt.Sprintf("cannot read the answer of the agent of node %s: %v", name, err))
	}
	return s, nil
}
