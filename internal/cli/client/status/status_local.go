package status

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/members"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/client/asnode"
	"github.com/fairlead/fairlead/internal/proxy"
)

// report asks as an administrator, and on a node without an administrator's kubeconfig
// as that node.
func reportFor(ctx context.Context, f *base.ClientFlags, probe *prober, want scope) (*Report, error) {
	cfg, namespace, err := f.Load()
	if want.service != "" && want.namespace == "" {
		want.namespace = cmp.Or(namespace, metav1.NamespaceDefault)
	}
	if err == nil {
		return reportOfCluster(ctx, cfg, probe, want)
	}
	a, err := asnode.Record(err, f)
	if err != nil {
		return nil, err
	}
	return reportOfNode(ctx, &a, f.DataDir, probe, want)
}

// ReportOf shows what the user of a client may see: of the whole cluster, of a namespace, or of a Service in it. It asks no other
// server of several, as the client leads to one.
func ReportOf(ctx context.Context, client kubernetes.Interface, namespace, service string) (*Report, error) {
	ctx, cancel := context.WithTimeout(ctx, base.RequestTimeout)
	defer cancel()
	return collect(ctx, client, "", nil, scope{namespace: namespace, service: service})
}

// membersTimeout bounds the question which servers answer.
const membersTimeout = 3 * time.Second

// reportOfCluster shows what an administrator may see. Without a quorum of servers that is only which of them do not answer: what
// else is asked would wait for a quorum.
func reportOfCluster(ctx context.Context, cfg *rest.Config, probe *prober, want scope) (*Report, error) {
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	servers := &Report{Server: cfg.Host, Nodes: []nodeReport{}, Services: []ServiceReport{}, Problems: []string{}}
	short, cancel := context.WithTimeout(ctx, membersTimeout)
	list, _ := members.Ask(short, cfg) // one server, another cluster, and a user who may not ask have no list
	cancel()
	if !servers.judgeMembers(list, func() bool { return hasQuorum(ctx, client) }) {
		return servers, nil
	}
	r, err := collect(ctx, client, "", probe, want)
	if err == nil {
		r.Problems = append(servers.Problems, r.Problems...)
	}
	return r, err
}

// report shows what a node knows: its proxy, and what the node itself may read.
func reportOfNode(ctx context.Context, a *base.AgentRecord, dataDir string, probe *prober, want scope) (*Report, error) {
	r, err := askAsNode(ctx, a, dataDir, probe, want)
	if err != nil {
		// What the machine itself answers is worth showing also then.
		r = &Report{Server: a.Server}
		r.problem("the server does not answer this node: %s%s", base.OneLine(err), base.Remedy(err))
	}
	r.Node = a.Node
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	health, body, err := base.GetLocal(ctx, a.Healthz, "/healthz")
	switch {
	case a.Healthz == "":
		r.Healthz = "not asked: its --healthz-bind-address is empty"
	case err != nil:
		r.Healthz = "does not answer: " + base.OneLine(err)
		r.problem("the agent of this node does not run, or does not answer at %s: %s", a.Healthz, base.OneLine(err))
	case health == http.StatusOK:
		r.Healthz = "healthy"
	default:
		r.Healthz = fmt.Sprintf("unhealthy: %d %s", health, strings.TrimSpace(string(body)))
		r.problem("the proxy of this node is not healthy: /healthz answers %d %s", health, strings.TrimSpace(string(body)))
	}
	code, body, err := base.GetLocal(ctx, a.Metrics, "/status")
	var s proxy.Status
	if err != nil || code != http.StatusOK || json.Unmarshal(body, &s) != nil {
		return r, nil
	}
	if len(r.Nodes) == 0 {
		r.Nodes = []nodeReport{{Name: a.Node, PodsUnknown: true}}
	}
	for i := range r.Nodes {
		if r.Nodes[i].Name == a.Node {
			r.Nodes[i].Programmed = &s
		}
	}
	return r, nil
}

// ask asks the API as the node.
func askAsNode(ctx context.Context, a *base.AgentRecord, dataDir string, probe *prober, want scope) (*Report, error) {
	cfg, err := asnode.Config(a, dataDir)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return nil, err
	}
	return collect(ctx, client, a.Node, probe, want)
}
