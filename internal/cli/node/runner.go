package node

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/cli/parts"
	"github.com/fairlead/fairlead/internal/flows"
	"github.com/fairlead/fairlead/internal/hubble"
	"github.com/fairlead/fairlead/internal/kernel/link"
	"github.com/fairlead/fairlead/internal/podspec"
	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/runner"
	"github.com/fairlead/fairlead/internal/runner/api"
	"github.com/fairlead/fairlead/internal/svc"
)

// runner returns the runner of Pods. It listens where the API server gets logs, exec, and the status of this node.
// The proxy, which is opened later, is only used while the node runs.
func (b *builder) runner() (*runner.Runner, error) {
	ca := func() (*x509.CertPool, error) { return authority(b.config) }
	if _, err := ca(); err != nil {
		return nil, err
	}
	clusterDNS, err := b.Networks.ClusterDNS()
	if err != nil {
		return nil, err
	}
	uids, err := runner.ParseUIDRange(b.Pods.uids)
	if err != nil {
		return nil, fmt.Errorf("--pod-uid-range: %w", err)
	}
	at := netip.AddrPortFrom(b.Host.IPs[0], b.Host.port)
	listener, err := parts.Listen(at, "--agent-port")
	if err != nil {
		return nil, fmt.Errorf("%w; --node-ip names an address of this machine", err)
	}
	images, err := podspec.ParseImages(b.Pods.images)
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	mirrors := b.client
	if b.Registrar != nil {
		if mirrors, err = kubernetes.NewForConfig(b.Registrar); err != nil {
			return nil, errors.Join(err, listener.Close())
		}
	}
	wg, err := b.Pods.network.wireguard(b.StateDir)
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	running := func() *proxy.Proxy { return b.proxy }
	r, err := runner.New(runner.Options{
		Client: b.client, NodeName: b.Host.Name, StateDir: b.StateDir, Log: b.Log,
		PodNetwork:   runner.PodNetwork(b.Pods.network.kind),
		Overlay:      link.OverlayOptions{VNI: int(b.Pods.network.vxlanVNI), Port: b.Pods.network.vxlanPort},
		WireGuard:    wg,
		Plain:        b.Pods.network.encrypt == encryptPreferred,
		ClusterCIDRs: b.Networks.PodCIDRs, ServiceCIDRs: b.Networks.ServiceCIDRs, ServerAddrs: parts.ServerAddrs(b.config, b.Log),
		Images: images, ClusterDNS: clusterDNS, ClusterDomain: b.DNS.Domains[0],
		Listener: listener, ClientCA: ca, Status: func() any { return b.proxy.Status() }, StopPods: b.StopPods,
		Views: map[string]api.View{
			"explain": parts.Explain(running), "history": parts.History(running),
			"services":      parts.Services(func() *flows.Reader { return b.counts }, true),
			api.RequestView: api.Requests(b.Host.Name, b.LB.Traced),
		},
		Trace: newTracing(b.Host.Name, running, b.Log).trace,
		Handlers: map[string]http.Handler{
			hubble.Path: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { b.Proxy.Flows().ServeHTTP(w, r) }),
		},
		Protect: true, UIDs: uids, PodPIDs: b.Pods.pids, Hide: []string{filepath.Dir(b.StateDir)}, // pki, and the store
		PodsChanged: func() { b.proxy.PodsChanged() },
		DrainWait:   b.Pods.drainWait, StaticDir: b.Pods.ManifestDir, Mirrors: mirrors, Hold: b.hold,
		NodeSet:   func(n *corev1.Node) { b.peers.Set(n); b.checks.Set(n) },
		NodeUnset: func(name string) { b.peers.Unset(name); b.checks.Unset(name) },
	})
	if err != nil {
		listener.Close()
	}
	return r, err
}

// wireguard opens what encrypts, nil without --encrypt. Then the private key of an agent that
// did is removed: its public key is no longer this node's, and another Node may have it.
func (f *podNetworkFlags) wireguard(stateDir string) (*link.WireGuard, error) {
	keyFile := filepath.Join(stateDir, "wireguard.key")
	if f.encrypt == encryptOff {
		if err := os.Remove(keyFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("remove the private key of WireGuard, which nothing encrypts with: %w", err)
		}
		return nil, nil
	}
	wg, err := link.OpenWireGuard(keyFile, f.wireguardPort)
	if err != nil {
		return nil, fmt.Errorf("--encrypt: %w", err)
	}
	return wg, nil
}

// authority returns the certificate authority of the server behind cfg, which has
// also signed the client certificate that the server uses towards agents.
func authority(cfg *rest.Config) (*x509.CertPool, error) {
	text, err := base.CAOf(cfg)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, errors.New("the kubeconfig names no certificate authority: an agent needs it to authenticate the server")
	}
	return pool, nil
}

// certReport returns the annotations by which a node reports what it trusts, and who signed its certificate. It is nil,
// so that the last report stays, while connections with the certificate before this one may be open.
func certReport(cfg *rest.Config, replacing func() bool) map[string]string {
	if replacing != nil && replacing() {
		return nil
	}
	ca, err := base.CAOf(cfg)
	if err != nil {
		return nil
	}
	cert := cfg.CertData
	if len(cert) == 0 && cfg.CertFile != "" {
		if cert, err = os.ReadFile(cfg.CertFile); err != nil {
			return nil // it is about to be renewed
		}
	}
	block, _ := pem.Decode(cert)
	if block == nil {
		return nil // it has a token
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil
	}
	return map[string]string{svc.AuthoritiesAnnotation: pki.ReportOf(ca, leaf).String()}
}
