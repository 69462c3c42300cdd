package lbview

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/svc"
)

// NewRebalance returns 'fairlead lb rebalance'.
func NewRebalance(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	cmd := &cobra.Command{
		Use:   "rebalance",
		Short: "Spread the addresses that nodes answer for by ARP and NDP evenly again",
		Long: `Spread the addresses that nodes answer for by ARP and NDP evenly over the nodes that
may announce them. A node that takes an address over keeps it until it fails itself,
also when the node that had it returns: each move breaks the open connections through the
address. So after a failure some nodes may have more addresses than others. This moves
those addresses, for the next 30 s, and breaks the connections through them.`,
		Example: `  fairlead lb status      # which node has which address
  fairlead lb rebalance`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, _, err := f.Load()
			if err != nil {
				return err
			}
			client, err := kubernetes.NewForConfig(config)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), base.RequestTimeout)
			defer cancel()
			if err := Rebalance(ctx, client); err != nil {
				return err
			}
			_, err = fmt.Fprintln(g.Out, "the speakers give each address to the node that should have it; 'fairlead lb status' shows which")
			return err
		},
	}
	f.Add(cmd)
	return cmd
}

// Rebalance asks all speakers to give the addresses that other nodes should have to them.
func Rebalance(ctx context.Context, client kubernetes.Interface) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{
		claim.RebalanceAnnotation: time.Now().UTC().Format(time.RFC3339Nano)}}})
	if err != nil {
		return err
	}
	api := client.CoreV1().ConfigMaps(svc.SystemNamespace)
	_, err = api.Patch(ctx, svc.VotersConfigMap, types.MergePatchType, patch, metav1.PatchOptions{})
	if apierrors.IsNotFound(err) {
		return errors.New("no node announces addresses by ARP or NDP: there is no list of voters")
	}
	return err
}
