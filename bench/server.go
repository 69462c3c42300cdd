package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// api is a running API server, fairlead's own, that the programs under
// measurement share.
type api struct {
	*process
	client     *kubernetes.Clientset
	config     *rest.Config
	kubeconfig string // reaches it from every host
	token      string // file of the token with which nodes join
}

// startAPI starts an API server without any controller.
func (b *bench) startAPI(ctx context.Context) (*api, error) {
	return b.startAPIWith(ctx, "--controllers", "none")
}

// startAPIWith starts an API server on an empty data directory, with further arguments, and
// waits until it is ready.
func (b *bench) startAPIWith(ctx context.Context, args ...string) (*api, error) {
	dir, err := os.MkdirTemp(b.dir, "api-")
	if err != nil {
		return nil, err
	}
	data := filepath.Join(dir, "data")
	p, err := spawn(nil, dir, "server", b.fairlead, append([]string{"server", "--data-dir", data,
		"--bind-address", "127.0.0.1," + switchAddr, "--advertise-address", switchAddr}, args...)...)
	if err != nil {
		return nil, err
	}
	a := &api{process: p, kubeconfig: filepath.Join(dir, "kubeconfig"), token: filepath.Join(data, "node-token")}
	admin := filepath.Join(data, "admin.kubeconfig")
	if err := waitFor(ctx, time.Minute, 10*time.Millisecond, p, func() error {
		if a.client == nil {
			if a.config, err = clientcmd.BuildConfigFromFlags("", admin); err != nil {
				return err
			}
			if a.client, err = newClient(a.config); err != nil {
				return err
			}
		}
		return a.client.RESTClient().Get().AbsPath("/readyz").Timeout(time.Second).Do(ctx).Error()
	}); err != nil {
		_ = p.stop()
		return nil, fmt.Errorf("the API server is not ready: %w", err)
	}
	if err := a.writeKubeconfig(admin); err != nil {
		_ = p.stop()
		return nil, err
	}
	if err := makeNamespace(ctx, a.client); err != nil {
		_ = p.stop()
		return nil, err
	}
	return a, nil
}

// writeKubeconfig writes the administrator's kubeconfig with the address that
// hosts reach the server at.
func (a *api) writeKubeconfig(admin string) error {
	cfg, err := clientcmd.LoadFromFile(admin)
	if err != nil {
		return err
	}
	for _, c := range cfg.Clusters {
		c.Server = "https://" + switchAddr + ":6443"
	}
	return clientcmd.WriteToFile(*cfg, a.kubeconfig)
}

// waitFor tries again every pause until check succeeds, the process has ended
// or the time is over.
func waitFor(ctx context.Context, within, pause time.Duration, p *process, check func() error) error {
	deadline := time.Now().Add(within)
	for {
		err := check()
		if err == nil {
			return nil
		}
		if dead := p.alive(); dead != nil {
			return dead
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			return fmt.Errorf("after %s: %w", within, err)
		}
		time.Sleep(pause)
	}
}
