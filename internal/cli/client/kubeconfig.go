package client

import (
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/fairlead/fairlead/internal/cli/base"
)

// NewKubeconfig returns 'fairlead kubeconfig'.
func NewKubeconfig(g *base.Global) *cobra.Command {
	var dataDir, server string
	var path bool
	cmd := &cobra.Command{
		Use:   "kubeconfig",
		Short: "Print the administrator's kubeconfig of the server on this machine",
		Example: `  fairlead kubeconfig > ~/.kube/config
  export KUBECONFIG=$(fairlead kubeconfig --path)
  fairlead kubeconfig --server https://192.0.2.11:6443`,
		Args: base.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			file := filepath.Join(dataDir, base.AdminKubeconfig)
			text, err := os.ReadFile(file)
			if errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("no %s: start a server with 'fairlead up' or 'fairlead server', or name its --data-dir", file)
			}
			if err != nil {
				return err
			}
			switch {
			case path && server != "":
				return base.Usagef("--path prints the path of a file for the server of this machine: give either --path or --server")
			case server != "":
				text, err = withServer(text, server)
				if err != nil {
					return err
				}
			case path:
				_, err = fmt.Fprintln(g.Out, file)
				return err
			}
			_, err = g.Out.Write(text)
			return err
		},
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", base.DefaultDataDir(), "data directory of the server")
	cmd.Flags().StringVar(&server, "server", "", "URL of another server of the cluster for the kubeconfig")
	cmd.Flags().BoolVar(&path, "path", false, "print the path of the file instead of its content")
	return cmd
}

// withServer returns a kubeconfig that leads to another server of its cluster.
func withServer(kubeconfig []byte, server string) ([]byte, error) {
	if u, err := url.Parse(server); err != nil || u.Scheme != "https" || u.Host == "" {
		return nil, base.Usagef("--server: %q is not the address of a server: want https://HOST:PORT", server)
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
