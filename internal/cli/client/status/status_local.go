package status

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/proxy"
)

// report asks as an administrator, and on a node without an administrator's kubeconfig
// as that node.
func reportFor(ctx context.Context, f *base.ClientFlags, probe *prober, want scope) (*Report, error) {
	client, namespace, err := f.Client()
	if want.service != "" && want.namespace == "" {
		want.namespace = cmp.Or(namespace, metav1.NamespaceDefault)
	}
	if err == nil {
		return collect(ctx, client, "", probe, want)
	}
	if f.Kubeconfig != "" || os.Getenv("KUBECONFIG") != "" || !errors.Is(err, base.ErrNoKubeconfig) {
		return nil, err
	}
	a, missing := base.ReadRecord(f.DataDir)
	switch {
	case errors.Is(missing, fs.ErrNotExist):
		return nil, err
	case errors.Is(missing, fs.ErrPermission):
		return nil, fmt.Errorf("no permission to read %s: run this as root", base.AgentRecordFile(f.DataDir))
	case missing != nil:
		return nil, missing
	}
	return reportOfNode(ctx, &a, f.DataDir, probe, want)
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
	var cfg *rest.Config
	if a.Kubeconfig != "" {
		c := base.ClientFlags{Kubeconfig: a.Kubeconfig}
		var err error
		if cfg, _, err = c.Load(); err != nil {
			return nil, err
		}
	} else {
		n, err := join.Open(a.Server, a.Node, base.NodePKI(dataDir), slog.New(slog.DiscardHandler))
		if err != nil {
			return nil, fmt.Errorf("the node's certificate: %w", err)
		}
		cfg = n.Config()
	}
	client, err := kubernetes.NewForConfig(base.AgentConfig(cfg))
	if err != nil {
		return nil, err
	}
	return collect(ctx, client, a.Node, probe, want)
}
