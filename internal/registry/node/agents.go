package node

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fairlead/fairlead/internal/registry/proxy"
	"github.com/fairlead/fairlead/internal/svc"
)

// Timeouts of connections to agents. What follows, a log or a shell, may last.
const (
	dialTimeout     = 10 * time.Second
	idleConnTimeout = 30 * time.Second
)

// AgentCredentials returns the client certificate that agents know the server
// by; it may change while the server runs.
type AgentCredentials func() (*tls.Certificate, error)

// getter is the part of a storage that finds an object.
type getter interface {
	Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error)
}

// Agents reaches the agents of nodes over HTTPS: the server shows a client
// certificate, and the agent must have the certificate whose hash its Node
// names.
type Agents struct {
	nodes getter
	creds AgentCredentials

	mu         sync.Mutex
	transports map[string]*http.Transport // by certificate hash
}

// maxTransports bounds the idle transports kept; one is small, and a node has
// a new hash only after its agent was set up again.
const maxTransports = 1000

func newAgents(nodes getter, creds AgentCredentials) *Agents {
	return &Agents{nodes: nodes, creds: creds, transports: map[string]*http.Transport{}}
}

// Agent is how to reach one node's agent. Base has scheme and host.
type Agent struct {
	Base      url.URL
	Transport *http.Transport
}

// Find returns how to reach the agent of the named node. The error is an API
// status that names the missing part.
func (a *Agents) Find(ctx context.Context, node string) (*Agent, error) {
	obj, err := a.nodes.Get(ctx, node, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	n := obj.(*corev1.Node)
	host := agentHost(n)
	if host == "" {
		return nil, apierrors.NewServiceUnavailable(fmt.Sprintf("node %s has no InternalIP address in its status: is its agent running?", node))
	}
	port := n.Status.DaemonEndpoints.KubeletEndpoint.Port
	if port == 0 {
		return nil, apierrors.NewServiceUnavailable(
			fmt.Sprintf("node %s names no port of its agent in status.daemonEndpoints.kubeletEndpoint: is its agent running?", node))
	}
	hash := strings.ToLower(n.Annotations[svc.ServingCertAnnotation])
	if raw, err := hex.DecodeString(hash); err != nil || len(raw) != sha256.Size {
		return nil, apierrors.NewServiceUnavailable(
			fmt.Sprintf("node %s has no valid annotation %s, so its agent cannot be recognised: restart the agent", node, svc.ServingCertAnnotation))
	}
	return &Agent{
		Base:      url.URL{Scheme: "https", Host: net.JoinHostPort(host, strconv.Itoa(int(port)))},
		Transport: a.transport(hash),
	}, nil
}

// locate finds where a request to the proxy of a node goes: to the node's agent,
// or to another port of the node.
func (a *Agents) locate(ctx context.Context, t proxy.Target) (url.URL, http.RoundTripper, error) {
	agent, err := a.Find(ctx, t.Name)
	if err != nil {
		return url.URL{}, nil, err
	}
	if t.Port == "" || t.Port == agent.Base.Port() {
		// The agent is known by its certificate, wherever it is.
		return agent.Base, agent.Transport, nil
	}
	host := agent.Base.Hostname()
	return url.URL{Scheme: t.Scheme, Host: net.JoinHostPort(host, t.Port)}, nil, proxy.CheckAddress(host)
}

func agentHost(n *corev1.Node) string {
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			return a.Address
		}
	}
	return ""
}

func (a *Agents) transport(hash string) *http.Transport {
	a.mu.Lock()
	defer a.mu.Unlock()
	if t, ok := a.transports[hash]; ok {
		return t
	}
	if len(a.transports) >= maxTransports {
		for h, t := range a.transports {
			t.CloseIdleConnections()
			delete(a.transports, h)
			break
		}
	}
	t := &http.Transport{
		DialContext:         (&net.Dialer{Timeout: dialTimeout}).DialContext,
		TLSHandshakeTimeout: dialTimeout,
		IdleConnTimeout:     idleConnTimeout,
		TLSClientConfig:     a.tlsConfig(hash),
	}
	a.transports[hash] = t
	return t
}

func (a *Agents) tlsConfig(hash string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		// The agent's certificate is its own; its hash is what counts.
		InsecureSkipVerify: true,
		VerifyPeerCertificate: func(raw [][]byte, _ [][]*x509.Certificate) error {
			if len(raw) == 0 {
				return errors.New("the agent showed no certificate")
			}
			got := sha256.Sum256(raw[0])
			want, err := hex.DecodeString(hash)
			if err != nil || !bytes.Equal(got[:], want) {
				return fmt.Errorf("the agent's certificate has hash %x, the annotation of its Node is %s", got, hash)
			}
			return nil
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return a.creds() },
	}
}

// CloseIdle closes connections that no request uses.
func (a *Agents) CloseIdle() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, t := range a.transports {
		t.CloseIdleConnections()
	}
}
