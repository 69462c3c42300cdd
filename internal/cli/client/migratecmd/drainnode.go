package migratecmd

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/migrate"
	"github.com/fairlead/fairlead/internal/migrate/drain"
)

// drainNode is what the Pods run that wait for the connections of kube-proxy's mode ipvs.
func (c *command) drainNode() *cobra.Command {
	var within time.Duration
	cmd := &cobra.Command{
		Use: "drain-node", Hidden: true, Args: base.NoArgs, Short: "Wait for the connections of IPVS (run by 'fairlead migrate')",
		Long: `Wait until no connection of TCP or SCTP depends on the rules of kube-proxy's mode ipvs on this
node. If some still do, the exit code is 75. New connections of the node begin at its own
address from now on, and datagrams of UDP meet the rules of fairlead proxy.`,
		Example: "  fairlead migrate drain-node --within 5s",
		RunE: func(cmd *cobra.Command, _ []string) error {
			left, err := drain.IPVS(cmd.Context(), within)
			if err != nil {
				return err
			}
			fmt.Fprintln(c.Out, left.String())
			if left.Open > 0 {
				return base.ExitCodeError(migrate.StillOpen)
			}
			return nil
		},
	}
	cmd.Flags().DurationVar(&within, "within", 5*time.Second, "how long to wait")
	return cmd
}
