package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/proxy"
)

// agentRecord is what an agent leaves in its state directory for 'fairlead status' on
// the same machine.
type agentRecord struct {
	Node string `json:"node"`
	// Server is the URL with which the node joined; Kubeconfig, in its place, the file of
	// --kubeconfig.
	Server     string `json:"server,omitempty"`
	Kubeconfig string `json:"kubeconfig,omitempty"`
	// Healthz and Metrics are the addresses of the proxy's endpoints, empty where it has none.
	Healthz string `json:"healthz,omitempty"`
	Metrics string `json:"metrics,omitempty"`
}

func agentRecordFile(dataDir string) string { return filepath.Join(nodeState(dataDir), "agent.json") }

// writeRecord leaves the record of this agent.
func (f *agentFlags) writeRecord(server, kubeconfig string) error {
	if kubeconfig != "" {
		var err error
		if kubeconfig, err = filepath.Abs(kubeconfig); err != nil {
			return err
		}
	}
	text, err := json.Marshal(agentRecord{f.nodeName, server, kubeconfig, f.healthz, f.metrics})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(f.stateDir, 0o700); err != nil {
		return err
	}
	return fileio.Replace(agentRecordFile(filepath.Dir(f.stateDir)), text, 0o600)
}

// readRecord returns the record in a data directory.
func readRecord(dataDir string) (a agentRecord, err error) {
	text, err := os.ReadFile(agentRecordFile(dataDir))
	if err != nil {
		return a, err
	}
	if err := json.Unmarshal(text, &a); err != nil {
		return a, fmt.Errorf("%s: %w", agentRecordFile(dataDir), err)
	}
	return a, nil
}

// report asks as an administrator, and on a node without an administrator's kubeconfig
// as that node.
func (f *clientFlags) report(ctx context.Context, probe *prober) (*report, error) {
	client, _, err := f.client()
	if err == nil {
		return collect(ctx, client, "", probe)
	}
	if f.kubeconfig != "" || os.Getenv("KUBECONFIG") != "" || !errors.Is(err, errNoKubeconfig) {
		return nil, err
	}
	a, missing := readRecord(f.dataDir)
	switch {
	case errors.Is(missing, fs.ErrNotExist):
		return nil, err
	case errors.Is(missing, fs.ErrPermission):
		return nil, fmt.Errorf("no permission to read %s: run this as root", agentRecordFile(f.dataDir))
	case missing != nil:
		return nil, missing
	}
	return a.report(ctx, f.dataDir, probe)
}

// report shows what a node knows: its proxy, and what the node itself may read.
func (a *agentRecord) report(ctx context.Context, dataDir string, probe *prober) (*report, error) {
	r, err := a.ask(ctx, dataDir, probe)
	if err != nil {
		// What the machine itself answers is worth showing also then.
		r = &report{Server: a.Server}
		r.problem("the server does not answer this node: %s%s", oneLine(err), remedy(err))
	}
	r.Node = a.Node
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	health, body, err := getLocal(ctx, a.Healthz, "/healthz")
	switch {
	case a.Healthz == "":
		r.Healthz = "not asked: its --healthz-bind-address is empty"
	case err != nil:
		r.Healthz = "does not answer: " + oneLine(err)
		r.problem("the agent of this node does not run, or does not answer at %s: %s", a.Healthz, oneLine(err))
	case health == http.StatusOK:
		r.Healthz = "healthy"
	default:
		r.Healthz = fmt.Sprintf("unhealthy: %d %s", health, strings.TrimSpace(string(body)))
		r.problem("the proxy of this node is not healthy: /healthz answers %d %s", health, strings.TrimSpace(string(body)))
	}
	code, body, err := getLocal(ctx, a.Metrics, "/status")
	var s proxy.Status
	if err != nil || code != http.StatusOK || json.Unmarshal(body, &s) != nil {
		return r, nil
	}
	if len(r.Nodes) == 0 {
		r.Nodes = []nodeReport{{Name: a.Node}}
	}
	for i := range r.Nodes {
		if r.Nodes[i].Name == a.Node {
			r.Nodes[i].Programmed = &s
		}
	}
	return r, nil
}

// ask asks the API as the node.
func (a *agentRecord) ask(ctx context.Context, dataDir string, probe *prober) (*report, error) {
	var cfg *rest.Config
	if a.Kubeconfig != "" {
		c := clientFlags{kubeconfig: a.Kubeconfig}
		var err error
		if cfg, _, err = c.load(); err != nil {
			return nil, err
		}
	} else {
		n, err := join.Open(a.Server, a.Node, nodePKI(dataDir), slog.New(slog.DiscardHandler))
		if err != nil {
			return nil, fmt.Errorf("the node's certificate: %w", err)
		}
		cfg = n.Config()
	}
	client, err := kubernetes.NewForConfig(agentConfig(cfg))
	if err != nil {
		return nil, err
	}
	return collect(ctx, client, a.Node, probe)
}

// maxAnswer bounds what is read of an answer of this machine.
const maxAnswer = 4 << 20

// getLocal asks this machine at an address to listen on.
func getLocal(ctx context.Context, bind, path string) (code int, body []byte, err error) {
	host, port, err := net.SplitHostPort(bind)
	if err != nil {
		return 0, nil, err
	}
	if a, err := netip.ParseAddr(host); host == "" || err == nil && a == netip.IPv4Unspecified() {
		host = "127.0.0.1"
	} else if err == nil && a == netip.IPv6Unspecified() {
		host = "::1"
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+path, http.NoBody)
	if err != nil {
		return 0, nil, err
	}
	// Without a proxy of the environment: this is this machine.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Do(q)
	if err != nil {
		return 0, nil, err
	}
	defer answer.Body.Close()
	body, err = io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	return answer.StatusCode, body, err
}
