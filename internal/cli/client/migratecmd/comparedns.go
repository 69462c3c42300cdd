package migratecmd

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/migrate/coredns/compare"
)

// compareDNS is what the Pod runs that compares servers.
func (c *command) compareDNS() *cobra.Command {
	var o compare.Options
	var servers []string
	var like string
	cmd := &cobra.Command{
		Use: "compare-dns NAME/TYPE...", Hidden: true, Args: cobra.MinimumNArgs(1),
		Short:   "Compare the answers of DNS servers (run by 'fairlead migrate')",
		Example: "  fairlead migrate compare-dns --servers 10.244.1.5:53 --like 10.244.1.4:53 kubernetes.default.svc.cluster.local/A",
		PreRunE: func(_ *cobra.Command, args []string) error {
			for _, text := range servers {
				at, err := netip.ParseAddrPort(text)
				if err != nil {
					return base.Usagef("--servers has %q; want IP:PORT", text)
				}
				o.Servers = append(o.Servers, at)
			}
			var err error
			if o.Like, err = netip.ParseAddrPort(like); err != nil || len(o.Servers) == 0 {
				return base.Usagef("--servers is %q and --like %q; want IP:PORT in both", servers, like)
			}
			for _, text := range args {
				q, err := compare.ParseQuestion(text)
				if err != nil {
					return base.Usagef("%v", err)
				}
				o.Questions = append(o.Questions, q)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := compare.Run(cmd.Context(), o); err != nil {
				return err
			}
			fmt.Fprintf(c.Out, "%d answers of %d servers equal the answers of %s\n", len(o.Questions), len(o.Servers), o.Like)
			return nil
		},
	}
	cmd.Flags().StringSliceVar(&servers, "servers", nil, "IP:PORT of the servers to compare")
	cmd.Flags().StringVar(&like, "like", "", "IP:PORT of the server to compare them with")
	cmd.Flags().DurationVar(&o.Within, "within", time.Minute, "how long differences may last")
	return cmd
}
