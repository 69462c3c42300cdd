package main

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// upstreamAPI is a running kube-apiserver with its own etcd, both on
// loopback.
type upstreamAPI struct {
	etcd, server *process
	config       *rest.Config // of an administrator
	client       *kubernetes.Clientset
	kubeconfig   string // the same as a file
	store        string // client URL of the etcd
}

// startKubernetes starts the etcd and kube-apiserver of the folder peers with
// all they keep in dir, and waits until the API is ready. extra are further
// arguments for kube-apiserver.
func startKubernetes(ctx context.Context, dir, peers string, extra ...string) (_ *upstreamAPI, err error) {
	u := &upstreamAPI{kubeconfig: filepath.Join(dir, "kubeconfig")}
	defer func() {
		if err != nil {
			err = errors.Join(err, u.stop())
		}
	}()
	ports, err := freePorts(3)
	if err != nil {
		return nil, err
	}
	store, peer := "http://127.0.0.1:"+ports[0], "http://127.0.0.1:"+ports[1]
	u.store = store
	if u.etcd, err = spawn(nil, dir, "etcd", filepath.Join(peers, "etcd"), "--data-dir", filepath.Join(dir, "etcd"), "--log-level", "warn",
		"--listen-client-urls", store, "--advertise-client-urls", store, "--listen-peer-urls", peer,
		"--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer, "--unsafe-no-fsync"); err != nil {
		return nil, err
	}
	key, tokens, certs := filepath.Join(dir, "sa.key"), filepath.Join(dir, "tokens"), filepath.Join(dir, "certs")
	token := rand.Text()
	if err := errors.Join(writeKey(key), os.WriteFile(tokens, []byte(token+",admin,admin,system:masters\n"), 0o600)); err != nil {
		return nil, err
	}
	// Unless the caller says so, admission that needs objects a cluster's other
	// programs make is off.
	if !slices.Contains(extra, "--disable-admission-plugins") {
		extra = append(extra, "--disable-admission-plugins", "ServiceAccount,TaintNodesByCondition")
	}
	args := append([]string{
		"--etcd-servers", store, "--bind-address", "127.0.0.1", "--secure-port", ports[2],
		"--advertise-address", "198.18.0.1", "--endpoint-reconciler-type", "none", // only data: never contacted
		"--cert-dir", certs, "--token-auth-file", tokens, "--authorization-mode", "Node,RBAC",
		"--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", key,
		"--service-account-signing-key-file", key,
		"--service-cluster-ip-range", "10.96.0.0/16,fd00:10:96::/112",
	}, extra...)
	if u.server, err = spawn(nil, dir, "kube-apiserver", filepath.Join(peers, "kube-apiserver"), args...); err != nil {
		return nil, err
	}
	return u, u.connect(ctx, "https://127.0.0.1:"+ports[2], filepath.Join(certs, "apiserver.crt"), token)
}

// connect writes the kubeconfig and waits until the API is ready.
func (u *upstreamAPI) connect(ctx context.Context, url, ca, token string) error {
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["c"] = &clientcmdapi.Cluster{Server: url, CertificateAuthority: ca, TLSServerName: "kubernetes.default.svc"}
	cfg.AuthInfos["admin"] = &clientcmdapi.AuthInfo{Token: token}
	cfg.Contexts["admin"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "admin"}
	cfg.CurrentContext = "admin"
	if err := clientcmd.WriteToFile(*cfg, u.kubeconfig); err != nil {
		return err
	}
	err := waitFor(ctx, 2*time.Minute, 50*time.Millisecond, u.server, func() (err error) {
		if dead := u.etcd.alive(); dead != nil {
			return dead
		}
		if u.client == nil {
			if u.config, err = clientcmd.BuildConfigFromFlags("", u.kubeconfig); err != nil {
				return err
			}
			if u.client, err = newClient(u.config); err != nil {
				return err // the certificate is not there yet
			}
		}
		return u.client.RESTClient().Get().AbsPath("/readyz").Timeout(5 * time.Second).Do(ctx).Error()
	})
	if err != nil {
		return fmt.Errorf("kube-apiserver is not ready: %w", err)
	}
	return nil
}

// stop ends both.
func (u *upstreamAPI) stop() error {
	var errs []error
	for _, p := range []*process{u.server, u.etcd} {
		if p != nil {
			errs = append(errs, p.stop())
		}
	}
	return errors.Join(errs...)
}

// writeKey makes the key that service account tokens are signed with.
func writeKey(path string) error {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return err
	}
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}), 0o600)
}

// freePorts returns TCP ports of 127.0.0.1 that had no listener a moment
// ago.
func freePorts(n int) ([]string, error) {
	var ports []string
	for range n {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer l.Close()
		_, port, err := net.SplitHostPort(l.Addr().String())
		if err != nil {
			return nil, err
		}
		ports = append(ports, port)
	}
	return ports, nil
}
