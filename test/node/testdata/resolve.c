/* resolve NAME...: looks names up with getaddrinfo(3) and prints the addresses,
 * one name a line. */
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv) {
	for (int i = 1; i < argc; i++) {
		struct addrinfo hints, *list;
		memset(&hints, 0, sizeof hints);
		hints.ai_socktype = SOCK_STREAM;
		int err = getaddrinfo(argv[i], NULL, &hints, &list);
		printf("%s", argv[i]);
		if (err) {
			printf(" error %s\n", gai_strerror(err));
			continue;
		}
		for (struct addrinfo *a = list; a; a = a->ai_next) {
			char text[INET6_ADDRSTRLEN];
			void *from = a->ai_family == AF_INET6 ? (void *)&((struct sockaddr_in6 *)a->ai_addr)->sin6_addr
			                                      : (void *)&((struct sockaddr_in *)a->ai_addr)->sin_addr;
			printf(" %s", inet_ntop(a->ai_family, from, text, sizeof text));
		}
		printf("\n");
	}
	return 0;
}
