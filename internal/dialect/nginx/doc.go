// Package nginx parses the annotations that ingress-nginx has given Ingresses
// (https://kubernetes.github.io/ingress-nginx/user-guide/nginx-configuration/annotations/). It is pure.
package nginx
