package client

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/env"
)

// NewEnv returns 'fairlead env'.
func NewEnv(g *base.Global) *cobra.Command {
	var f base.ClientFlags
	var pod string
	cmd := &cobra.Command{
		Use:   "env",
		Short: "Print the environment variables by which Pods of a namespace find Services",
		Long: `Print the environment variables by which a Pod that is started now in a namespace
finds Services, one NAME=VALUE a line, sorted by name: those of the namespace's
Services with a ClusterIP, and of default/kubernetes. With --pod, those of that Pod:
one with enableServiceLinks: false sees default/kubernetes alone. The Pod's own
variables, which come on top, are not among them.`,
		Example: `  fairlead env -n default
  fairlead env -n shop --pod web-7xk2p
  env -i $(fairlead env -n shop) ./my-program   # as if it ran in a Pod`,
		Args: base.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			client, namespace, err := f.Client()
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), base.RequestTimeout)
			defer cancel()
			vars, err := serviceVariables(ctx, client, namespace, pod)
			if err != nil {
				return err
			}
			for _, v := range vars {
				fmt.Fprintf(g.Out, "%s=%s\n", v.Name, v.Value)
			}
			return nil
		},
	}
	f.Add(cmd)
	f.AddNamespace(cmd)
	cmd.Flags().StringVar(&pod, "pod", "", "a Pod of the namespace, whose enableServiceLinks counts")
	return cmd
}

// serviceVariables are the variables of a Pod, or of any if pod is empty.
func serviceVariables(ctx context.Context, client kubernetes.Interface, namespace, pod string) ([]corev1.EnvVar, error) {
	links := corev1.DefaultEnableServiceLinks
	if pod == "" {
		// A namespace with a typing error has no Services either.
		if _, err := client.CoreV1().Namespaces().Get(ctx, namespace, metav1.GetOptions{}); err != nil {
			return nil, err
		}
	} else {
		p, err := client.CoreV1().Pods(namespace).Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		if p.Spec.EnableServiceLinks != nil {
			links = *p.Spec.EnableServiceLinks
		}
	}
	services, err := client.CoreV1().Services(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	master, err := client.CoreV1().Services(metav1.NamespaceDefault).Get(ctx, "kubernetes", metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, err
	}
	var all []*corev1.Service
	for i := range services.Items {
		all = append(all, &services.Items[i])
	}
	if err == nil {
		all = append(all, master)
	}
	return env.For(namespace, all, links), nil
}
