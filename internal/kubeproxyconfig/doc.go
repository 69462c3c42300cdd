// Package kubeproxyconfig reads the configuration of another program: kube-proxy's
// KubeProxyConfiguration (kubeproxy.config.k8s.io/v1alpha1, of Kubernetes v1.37.2). It becomes values of flags
// of 'fairlead proxy', notes about what has no effect there, or an error with line and field. The flags in
// turn become a KubeProxyConfiguration again, for /configz and --write-config-to.
//
// The package is pure: it opens no file and asks no server.
package kubeproxyconfig
