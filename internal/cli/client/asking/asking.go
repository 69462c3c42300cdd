// Package asking asks the nodes of a cluster what they have, with the rights of a user: agents by the API server, and nodes where only
// 'fairlead proxy' runs by the Pod of the proxy.
package asking

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/cli/base"
)

const (
	// Timeout bounds a question to one node. The first questions may also wait that long for the list of the proxies.
	Timeout = 10 * time.Second
	// maxAnswer bounds the answer of a node, in bytes: what a machine sends is not trusted.
	maxAnswer = 32 << 20
	// hereTimeout bounds the question whether this machine is a node.
	hereTimeout = 2 * time.Second
)

// Nodes asks nodes. It is safe for concurrent use.
type Nodes struct {
	client kubernetes.Interface
	config *rest.Config
	here   string
	program

	once sync.Once // guards what follows
	// pods are the Pods of the program by node; unlisted is why they are not known.
	pods     map[string]*corev1.Pod
	unlisted error
	self     string // the node that this machine is, empty if it is none
}

// New returns Nodes that only ask agents.
func New(client kubernetes.Interface) *Nodes { return &Nodes{client: client} }

// Balancers returns Nodes that ask a node without an agent by the Pod of 'fairlead lb', with the same rights.
func (n *Nodes) Balancers() *Nodes {
	return &Nodes{client: n.client, config: n.config, program: program{"fairlead lb", balancerLabels, balancerPort}}
}

func proxyProgram() program { return program{"fairlead proxy", labels, defaultPort} }

// For returns Nodes that ask a node without an agent by the Pod of its proxy, with the rights of cfg.
func For(client kubernetes.Interface, cfg *rest.Config) *Nodes {
	return &Nodes{client: client, config: cfg, program: proxyProgram()}
}

// FromHere is For, for a user of this machine: the proxy of this machine is asked on loopback, without a right.
func FromHere(client kubernetes.Interface, cfg *rest.Config) *Nodes {
	return &Nodes{client: client, config: cfg, program: proxyProgram(), here: fmt.Sprintf("127.0.0.1:%d", defaultPort)}
}

// Client has the rights of the user.
func (n *Nodes) Client() kubernetes.Interface { return n.client }

// Config has the rights of the user, nil if only agents are asked.
func (n *Nodes) Config() *rest.Config { return n.config }

// Get asks a node at a path of its agent or its proxy. WhyNot tells its error.
func (n *Nodes) Get(ctx context.Context, node, path string, query url.Values) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	request := n.client.CoreV1().RESTClient().Get().Resource("nodes").Name(node).SubResource("proxy").Suffix(path)
	for name, values := range query {
		for _, v := range values {
			request.Param(name, v)
		}
	}
	text, err := Answer(ctx, request)
	if err == nil || n.config == nil || !base.IsAnswer(err) || apierrors.IsBadRequest(err) || apierrors.IsTooManyRequests(err) {
		return text, err
	}
	n.once.Do(func() { n.look(context.WithoutCancel(ctx)) })
	where := path
	if len(query) > 0 {
		where += "?" + query.Encode()
	}
	if n.self == node {
		code, text, hereErr := base.GetLocal(ctx, n.here, "/"+where)
		if hereErr == nil && code == http.StatusOK {
			return text, nil
		}
	}
	pod := n.pods[node]
	if pod == nil {
		return nil, &noAgent{n.name, err, n.unlisted}
	}
	if text, err = n.byPod(ctx, pod, where); err != nil {
		return nil, &noProxy{n.name, pod, err}
	}
	return text, nil
}

// Answer reads the answer of an agent to a request.
func Answer(ctx context.Context, request *rest.Request) ([]byte, error) {
	body, err := request.Stream(ctx)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return readAnswer(body)
}

func readAnswer(from io.Reader) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(from, maxAnswer+1))
	if err == nil && len(text) > maxAnswer {
		err = fmt.Errorf("its answer is longer than %d MiB", maxAnswer>>20)
	}
	return text, err
}

// look finds the proxies of the cluster, and the node that this machine is.
func (n *Nodes) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	n.pods, n.unlisted = n.program.proxies(ctx, n.client)
	if n.here == "" {
		return
	}
	ctx, end := context.WithTimeout(ctx, hereTimeout)
	defer end()
	var status struct {
		Node string `json:"node"`
	}
	if code, text, err := base.GetLocal(ctx, n.here, "/status"); err == nil && code == http.StatusOK && json.Unmarshal(text, &status) == nil {
		n.self = status.Node
	}
}

// noAgent is the error of a node without an agent and without a Pod of a proxy.
type noAgent struct {
	program       string
	err, unlisted error
}

func (e *noAgent) Error() string { return base.OneLine(e.err) }
func (e *noAgent) Unwrap() error { return e.err }

// noProxy is the error of a node whose proxy has not answered.
type noProxy struct {
	program string
	pod     *corev1.Pod
	err     error
}

func (e *noProxy) Error() string { return base.OneLine(e.err) }
func (e *noProxy) Unwrap() error { return e.err }

// WhyNot is why a node has not answered, by the error of Get.
func WhyNot(err error) string {
	var proxy *noProxy
	if errors.As(err, &proxy) {
		name := "Pod " + proxy.pod.Namespace + "/" + proxy.pod.Name
		if apierrors.IsForbidden(err) {
			return fmt.Sprintf("it takes the right to create pods/portforward in %s to ask its %s, %s", proxy.pod.Namespace,
				short(proxy.program), name)
		}
		return fmt.Sprintf("its %s, %s, does not answer: %s", short(proxy.program), name, base.OneLine(err))
	}
	var agent *noAgent
	unlisted := errors.As(err, &agent) && apierrors.IsForbidden(agent.unlisted)
	switch {
	case agent != nil && agent.unlisted != nil && !unlisted:
		return "no agent of fairlead answers there, and the Pods of " + agent.program + " are not known: " + base.OneLine(agent.unlisted)
	case apierrors.IsForbidden(err) && unlisted:
		return "it takes the right to get nodes/proxy to ask it, or, where only " + agent.program + " runs, to list pods and create " +
			"pods/portforward in " + namespace
	case apierrors.IsForbidden(err):
		return "it takes the right to get nodes/proxy to ask it"
	case apierrors.IsNotFound(err) && unlisted:
		return "no agent of fairlead answers there, and it takes the rights to list pods and create pods/portforward in " + namespace +
			" to ask its " + short(agent.program)
	case apierrors.IsNotFound(err) && agent != nil:
		return "no agent of fairlead answers there, and " + namespace + " has no ready Pod of " + agent.program + " for it"
	case apierrors.IsNotFound(err):
		return "no agent of fairlead answers there"
	}
	return "its agent does not answer: " + base.OneLine(err)
}

// short is the last word of a program, as in "its proxy".
func short(program string) string { return strings.TrimPrefix(program, "fairlead ") }

// ThereItself reports whether the node has, or may have, a proxy that a command on the node can ask without a right.
func ThereItself(err error) bool {
	var agent *noAgent
	var proxy *noProxy
	return errors.As(err, &proxy) || errors.As(err, &agent) && agent.unlisted != nil
}
