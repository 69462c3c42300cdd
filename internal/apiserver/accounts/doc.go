// Package accounts makes and recognises the tokens of ServiceAccounts: signed
// statements that end by themselves, and with the object they are bound to.
//
// Issuer signs them, for the subresource serviceaccounts/token. Authenticator
// recognises them and asks whether what they speak of is still there. Discovery
// shows the public keys, so that others can recognise them too (OpenID Connect
// Discovery 1.0). Admission gives Pods their account and its token, and Keeper
// makes the account "default" and the authority's certificate in every
// namespace.
package accounts
