package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// adminKubeconfig is the name of the administrator's kubeconfig in a data
// directory.
const adminKubeconfig = "admin.kubeconfig"

// systemDataDir, systemConfigDir and systemServicesDir are root's.
const (
	systemDataDir     = "/var/lib/fairlead"
	systemConfigDir   = "/etc/fairlead"
	systemServicesDir = systemConfigDir + "/services.d"
)

// defaultDataDir is /var/lib/fairlead for root, and the user's state directory
// for others (XDG base directory specification).
func defaultDataDir() string {
	if os.Geteuid() == 0 && !mappedRoot() {
		return systemDataDir
	}
	state := os.Getenv("XDG_STATE_HOME")
	if state == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "fairlead-data"
		}
		state = filepath.Join(home, ".local", "state")
	}
	return filepath.Join(state, "fairlead")
}

// mappedRoot reports whether this process is root only in a user namespace in
// which 0 stands for an ordinary user (user_namespaces(7)).
func mappedRoot() bool {
	text, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return false
	}
	var in, out, size uint32
	_, err = fmt.Sscan(string(text), &in, &out, &size)
	return err == nil && in == 0 && out != 0
}

// clientFlags select the API server of a command, and the identity.
type clientFlags struct {
	kubeconfig string
	dataDir    string
	namespace  string
}

func (f *clientFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.kubeconfig, "kubeconfig", "",
		"kubeconfig of the API server (default $KUBECONFIG, then in a Pod its service account, elsewhere "+
			adminKubeconfig+" in the data directory)")
	cmd.Flags().StringVar(&f.dataDir, "data-dir", defaultDataDir(), "data directory of the server on this machine")
}

func (f *clientFlags) addNamespace(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&f.namespace, "namespace", "n", "", "namespace (default: the kubeconfig's, else default)")
}

// path is the kubeconfig file in use.
func (f *clientFlags) path() string {
	if f.kubeconfig != "" {
		return f.kubeconfig
	}
	if env := os.Getenv("KUBECONFIG"); env != "" {
		return env
	}
	return filepath.Join(f.dataDir, adminKubeconfig)
}

// load reads the kubeconfig, or finds the Pod's service account where none is
// named; the namespace is that of the flag, the file or the Pod.
func (f *clientFlags) load() (cfg *rest.Config, namespace string, err error) {
	if f.kubeconfig == "" && os.Getenv("KUBECONFIG") == "" {
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
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{})
	cfg, err = loader.ClientConfig()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, "", fmt.Errorf("%w at %s: start a server with 'fairlead up' or 'fairlead server', "+
			"or name one with --kubeconfig", errNoKubeconfig, f.path())
	case errors.Is(err, fs.ErrPermission):
		return nil, "", fmt.Errorf("no permission to read %s: run this as the user who started the server", f.path())
	case err != nil:
		return nil, "", fmt.Errorf("kubeconfig %s: %w", f.path(), err)
	}
	cfg.UserAgent = "fairlead/" + version
	if namespace = f.namespace; namespace == "" {
		if namespace, _, err = loader.Namespace(); err != nil {
			return nil, "", fmt.Errorf("kubeconfig %s: %w", f.path(), err)
		}
	}
	return cfg, namespace, nil
}

// errNoKubeconfig is the error of load where there is no file.
var errNoKubeconfig = errors.New("no kubeconfig")

// podNamespace is where the kubelet writes the namespace of a Pod, beside its
// token.
const podNamespace = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

func (f *clientFlags) inPod(cfg *rest.Config) (*rest.Config, string, error) {
	cfg.UserAgent = "fairlead/" + version
	if f.namespace != "" {
		return cfg, f.namespace, nil
	}
	text, err := os.ReadFile(podNamespace)
	if err != nil {
		return nil, "", fmt.Errorf("the namespace of this Pod: %w", err)
	}
	return cfg, strings.TrimSpace(string(text)), nil
}

func (f *clientFlags) client() (kubernetes.Interface, string, error) {
	cfg, namespace, err := f.load()
	if err != nil {
		return nil, "", err
	}
	client, err := kubernetes.NewForConfig(cfg)
	return client, namespace, err
}

func newKubeconfig(g *global) *cobra.Command {
	var dataDir, server string
	var path bool
	cmd := &cobra.Command{
		Use:   "kubeconfig",
		Short: "Print the administrator's kubeconfig of the server on this machine",
		Example: `  fairlead kubeconfig > ~/.kube/config
  export KUBECONFIG=$(fairlead kubeconfig --path)
  fairlead kubeconfig --server https://192.0.2.11:6443`,
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			file := filepath.Join(dataDir, adminKubeconfig)
			text, err := os.ReadFile(file)
			if errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("no %s: start a server with 'fairlead up' or 'fairlead server', or name its --data-dir", file)
			}
			if err != nil {
				return err
			}
			switch {
			case path && server != "":
				return usagef("--path prints where the file is, which names the server of this machine: leave --path or --server out")
			case server != "":
				text, err = withServer(text, server)
				if err != nil {
					return err
				}
			case path:
				_, err = fmt.Fprintln(g.out, file)
				return err
			}
			_, err = g.out.Write(text)
			return err
		},
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir(), "data directory of the server")
	cmd.Flags().StringVar(&server, "server", "", "URL of another server of the cluster, to be in the kubeconfig in place of this one")
	cmd.Flags().BoolVar(&path, "path", false, "print where the file is instead of what is in it")
	return cmd
}

// withServer returns a kubeconfig that leads to another server of its cluster.
func withServer(kubeconfig []byte, server string) ([]byte, error) {
	if u, err := url.Parse(server); err != nil || u.Scheme != "https" || u.Host == "" {
		return nil, usagef("--server: %q is not the address of a server: want https://HOST:PORT", server)
	}
	cfg, err := clientcmd.Load(kubeconfig)
	if err != nil {
		return nil, err
	}
	for _, c := range cfg.Clusters {
		c.Server = server
	}
	return clientcmd.Write(*cfg)
}
