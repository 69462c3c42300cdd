package base

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"

	"github.com/fairlead/fairlead/internal/apiclient"
)

// ClientFlags select the API server of a command, and the identity.
type ClientFlags struct {
	Kubeconfig string
	// Master, if it is set, is the server in place of the kubeconfig's.
	Master    string
	DataDir   string
	Namespace string
}

// Add adds the flags to a command, without the namespace.
func (f *ClientFlags) Add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.Kubeconfig, "kubeconfig", "",
		"kubeconfig of the API server (default $KUBECONFIG, then in a Pod its service account, elsewhere "+
			AdminKubeconfig+" in the data directory)")
	cmd.Flags().StringVar(&f.DataDir, "data-dir", DefaultDataDir(), "data directory of the server on this machine")
}

// AddNamespace adds --namespace.
func (f *ClientFlags) AddNamespace(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&f.Namespace, "namespace", "n", "", "namespace (default: the kubeconfig's, else default)")
}

// path is the kubeconfig file in use.
func (f *ClientFlags) path() string {
	if f.Kubeconfig != "" {
		return f.Kubeconfig
	}
	if env := os.Getenv("KUBECONFIG"); env != "" {
		return env
	}
	return filepath.Join(f.DataDir, AdminKubeconfig)
}

// Load reads the kubeconfig, or finds the Pod's service account where none is
// named; the namespace is that of the flag, the file or the Pod.
func (f *ClientFlags) Load() (cfg *rest.Config, namespace string, err error) {
	if f.Kubeconfig == "" && os.Getenv("KUBECONFIG") == "" && f.Master == "" {
		cfg, err := rest.InClusterConfig()
		switch {
		case err == nil:
			return f.inPod(cfg)
		case !errors.Is(err, rest.ErrNotInCluster) && !errors.Is(err, fs.ErrNotExist):
			return nil, "", fmt.Errorf("the service account of this Pod: %w", err)
		}
	}
	rules := &clientcmd.ClientConfigLoadingRules{Precedence: filepath.SplitList(f.path())}
	if len(rules.Precedence) == 1 {
		rules = &clientcmd.ClientConfigLoadingRules{ExplicitPath: rules.Precedence[0]}
	}
	overrides := &clientcmd.ConfigOverrides{ClusterInfo: api.Cluster{Server: f.Master}}
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides)
	cfg, err = loader.ClientConfig()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, "", fmt.Errorf("%w at %s: start a server with 'fairlead up' or 'fairlead server', "+
			"or name one with --kubeconfig", ErrNoKubeconfig, f.path())
	case errors.Is(err, fs.ErrPermission):
		return nil, "", fmt.Errorf("no permission to read %s: run this as the user who started the server", f.path())
	case err != nil:
		return nil, "", fmt.Errorf("kubeconfig %s: %w", f.path(), err)
	}
	cfg.UserAgent = "fairlead/" + Version
	if namespace = f.Namespace; namespace == "" {
		if namespace, _, err = loader.Namespace(); err != nil {
			return nil, "", fmt.Errorf("kubeconfig %s: %w", f.path(), err)
		}
	}
	return cfg, namespace, nil
}

// ErrNoKubeconfig is the error of load where there is no file.
var ErrNoKubeconfig = errors.New("no kubeconfig")

// podNamespace is where the kubelet writes the namespace of a Pod, beside its
// token.
const podNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

func (f *ClientFlags) inPod(cfg *rest.Config) (*rest.Config, string, error) {
	cfg.UserAgent = "fairlead/" + Version
	if f.Namespace != "" {
		return cfg, f.Namespace, nil
	}
	text, err := os.ReadFile(podNamespace)
	if err != nil {
		return nil, "", fmt.Errorf("the namespace of this Pod: %w", err)
	}
	return cfg, strings.TrimSpace(string(text)), nil
}

// Client returns a client as Load finds it, and the namespace.
func (f *ClientFlags) Client() (kubernetes.Interface, string, error) {
	cfg, namespace, err := f.Load()
	if err != nil {
		return nil, "", err
	}
	client, err := kubernetes.NewForConfig(cfg)
	return client, namespace, err
}

// CAOf returns the authorities by which clients of cfg verify the server, as PEM. The ones in a file
// may change.
func CAOf(cfg *rest.Config) ([]byte, error) {
	if len(cfg.CAData) > 0 || cfg.CAFile == "" {
		return cfg.CAData, nil
	}
	text, err := os.ReadFile(cfg.CAFile)
	if err != nil {
		return nil, fmt.Errorf("the server's certificate authority: %w", err)
	}
	return text, nil
}

// AgentConfig returns cfg tuned for the clients of an agent.
func AgentConfig(cfg *rest.Config) *rest.Config {
	cfg = apiclient.Protobuf(cfg)
	cfg.UserAgent = ""
	return apiclient.Tuned(cfg, "fairlead-agent/"+Version)
}

// IsAnswer reports whether an error is a server's decision, as opposed to a server that cannot be
// asked or cannot decide.
func IsAnswer(err error) bool {
	var status apierrors.APIStatus
	return errors.As(err, &status) && status.Status().Code < 500
}

// RequestTimeout bounds one request to the API server.
const RequestTimeout = 30 * time.Second
